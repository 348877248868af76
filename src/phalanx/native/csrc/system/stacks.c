/* Stacks on demand, also of a thread that is just entering a function.
 *
 * faulthandler, a module of Python's, follows the interpreter's frames from a signal handler. When the signal comes
 * while the interpreter links in a new frame (Python 3.11 and later), it follows what is not set yet: it faults, which
 * would end the process, or it reads a line number for ever. So a copy of the process calls that handler, and only the
 * copy ends.
 *
 * The interpreter links a frame in by its own code, and calls nobody between the stores that do so. So a thread that is
 * elsewhere, as in torch or in the kernel, calls the handler itself, since a copy costs much time if the process has
 * much memory. Not covered are a handler of another library that has interrupted the interpreter and is interrupted
 * itself, greenlet while it switches, and code that Python's experimental JIT compiler has made.
 *
 * The copy is a child that no wait() of the program's finds, and that sends it no SIGCHLD. It has one thread, that
 * which was asked, and its own copy of all memory, so it writes nothing but the stack. It ends by itself, also if the
 * process is killed meanwhile. */
#define _GNU_SOURCE
#include "phalanx.h"

#include <errno.h>
#include <link.h>
#include <signal.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define LONGEST_US 100000 /* how long a copy may use a core; a stack takes less than a hundredth of that */

static const char unreadable[] = "\n" PHX_STACK_CHANGED "\n";
static const char empty[] = "Stack (most recent call first):\n"; /* as faulthandler begins one */

/* Of each signal: faulthandler's handler, and where that writes. Set before `on_asked` is installed for the signal. */
static struct asking {
    int fd;
    void (*handler)(int);
} askings[NSIG];

/* Where the file with the interpreter is in memory. Set before the first handler is installed. */
static struct range {
    uintptr_t begin, end;
} interpreter;

/* Find the file that has the address `data` in it, with all of its parts; for dl_iterate_phdr(). */
static int find_range(struct dl_phdr_info *file, size_t size, void *data)
{
    struct range all = {UINTPTR_MAX, 0};
    int is_in = 0;
    (void)size;
    for (int at = 0; at < file->dlpi_phnum; at++) {
        const ElfW(Phdr) *part = &file->dlpi_phdr[at];
        const uintptr_t begin = file->dlpi_addr + part->p_vaddr;
        if (part->p_type != PT_LOAD)
            continue;
        is_in |= (uintptr_t)data - begin < part->p_memsz;
        all.begin = begin < all.begin ? begin : all.begin;
        all.end = begin + part->p_memsz > all.end ? begin + part->p_memsz : all.end;
    }
    if (is_in)
        interpreter = all;
    return is_in;
}

/* Return whether a thread may be linking in a frame: it is in the interpreter's code, or that cannot be told. */
static int may_link(const ucontext_t *at)
{
#if defined(__x86_64__)
    const uintptr_t now = (uintptr_t)at->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    const uintptr_t now = (uintptr_t)at->uc_mcontext.pc;
#else
    const uintptr_t now = interpreter.begin;
    (void)at;
#endif
    return interpreter.end == 0 || (now >= interpreter.begin && now < interpreter.end);
}

static void leave(int number)
{
    (void)number;
    _exit(1);
}

static void write_and_leave(const struct asking *asking, int number)
{
    const struct sigaction action = {.sa_handler = leave};
    const struct itimerval longest = {.it_value.tv_usec = LONGEST_US};
    const int ends[] = {SIGSEGV, SIGBUS, SIGPROF};
    sigset_t unblocked;
    sigemptyset(&unblocked);
    for (size_t at = 0; at < sizeof ends / sizeof *ends; at++) {
        sigaction(ends[at], &action, NULL);
        sigaddset(&unblocked, ends[at]);
    }
    setitimer(ITIMER_PROF, &longest, NULL);
    sigprocmask(SIG_UNBLOCK, &unblocked, NULL);
    asking->handler(number);
    _exit(0);
}

static void on_asked(int number, siginfo_t *info, void *context)
{
    const int saved = errno;
    const struct asking *asking = &askings[number];
    const off_t before = lseek(asking->fd, 0, SEEK_CUR);
    (void)info;
    if (may_link(context)) {
        int status = 0;
        const long copy = syscall(SYS_clone, 0, 0, 0, 0, 0);
        if (copy == 0)
            write_and_leave(asking, number);
        /* Whoever has asked reads that it failed, and asks again. */
        if (copy < 0 || waitpid((pid_t)copy, &status, __WALL) < 0 || status)
            (void)!write(asking->fd, unreadable, sizeof unreadable - 1);
    } else {
        asking->handler(number);
    }
    /* Of a thread that runs no Python, such as Gloo's, faulthandler writes nothing, and who has asked would wait. */
    if (before >= 0 && lseek(asking->fd, 0, SEEK_CUR) == before)
        (void)!write(asking->fd, empty, sizeof empty - 1);
    errno = saved;
}

int phx_stacks_in_copy(int number, int fd, void *in_interpreter)
{
    struct sigaction has;
    if (number <= 0 || number >= NSIG || sigaction(number, NULL, &has) != 0)
        return PHX_BAD_ARGUMENT;
    if (has.sa_flags & SA_SIGINFO || has.sa_handler == SIG_DFL || has.sa_handler == SIG_IGN)
        return PHX_BAD_ARGUMENT;
    if (interpreter.end == 0)
        dl_iterate_phdr(find_range, in_interpreter);
    askings[number] = (struct asking){fd, has.sa_handler};
    struct sigaction action = {.sa_sigaction = on_asked, .sa_flags = SA_RESTART | SA_SIGINFO | (has.sa_flags & SA_ONSTACK)};
    sigfillset(&action.sa_mask); /* no other handler is to run while the copy does, but those of faults */
    sigdelset(&action.sa_mask, SIGSEGV);
    sigdelset(&action.sa_mask, SIGBUS);
    return sigaction(number, &action, NULL) == 0 ? PHX_OK : PHX_SYSTEM;
}
