/* Walking the frames of a call up to the user's program. */
#define _GNU_SOURCE
#include "site.h"

#include <dlfcn.h>

#define WAYS 4 /* in how many places of the table a code may be */

/* Whether frames with this code are passed over: 1 or 0; -1 if that is not known. */
static inline int is_known(const struct entry_codes *codes, const PyObject *code)
{
    const size_t at = (uintptr_t)code / 64;
    for (size_t i = 0; i < WAYS; i++) {
        const size_t place = (at + i) % ENTRY_CODES;
        if (codes->known[place].code == code)
            return codes->known[place].inside;
    }
    return -1;
}

/* Whether a frame is passed over: 1, 0, or -1 with an exception. */
static int is_inside(struct entry_codes *codes, PyObject *frame, PyObject *code)
{
    const int known = is_known(codes, code);
    if (known >= 0)
        return known;
    PyObject *answer = PyObject_CallFunctionObjArgs(codes->is_inside, frame, NULL);
    if (!answer)
        return -1;
    const int inside = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    if (inside < 0 || is_known(codes, code) >= 0) /* another thread may have asked meanwhile */
        return inside;
    size_t place = ((uintptr_t)code / 64 + codes->next++ % WAYS) % ENTRY_CODES;
    for (size_t i = 0; i < WAYS; i++)
        if (!codes->known[((uintptr_t)code / 64 + i) % ENTRY_CODES].code)
            place = ((uintptr_t)code / 64 + i) % ENTRY_CODES;
    PyObject *old = codes->known[place].code;
    Py_INCREF(code); /* held, so that no other code gets its address */
    codes->known[place].code = code;
    codes->known[place].inside = inside;
    Py_XDECREF(old);
    return inside;
}

int entry_find_frames(struct entry_codes *codes)
{
    codes->frames.back = (__typeof__(codes->frames.back))dlsym(RTLD_DEFAULT, "PyFrame_GetBack");
    codes->frames.lasti = (__typeof__(codes->frames.lasti))dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");
    codes->f_back = PyUnicode_InternFromString("f_back");
    codes->f_lasti = PyUnicode_InternFromString("f_lasti");
    return codes->f_back && codes->f_lasti ? 0 : -1;
}

int entry_read_frames(struct entry_codes *codes, int wanted)
{
    if (!wanted)
        codes->layout.minor = 0;
    else if (!codes->layout.minor)
        codes->layout = entry_learn_layout(&codes->frames);
    return codes->layout.minor != 0;
}

/* The frame that called `frame`, or NULL; with an exception if there is one. */
static PyObject *caller_of(struct entry_codes *codes, PyObject *frame)
{
    if (codes->frames.back)
        return codes->frames.back(frame);
    PyObject *caller = PyObject_GetAttr(frame, codes->f_back);
    if (caller != Py_None)
        return caller;
    Py_DECREF(caller);
    return NULL;
}

/* The innermost frame of the user's program on this thread's stack, and its code, both new references; NULL if there is
 * none, with an exception if there is one. */
static PyObject *user_frame(struct entry_codes *codes, PyObject **code)
{
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame) {
        *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        const int inside = is_inside(codes, frame, *code);
        if (!inside)
            return frame;
        Py_DECREF(*code);
        PyObject *caller = inside < 0 ? NULL : caller_of(codes, frame);
        Py_DECREF(frame);
        frame = caller;
    }
    return NULL; /* torch's C++ made the call, on a thread of its own */
}

/* The code of that frame, borrowed from it, and the instruction, without an object of any frame. NULL if there is none,
 * if a code on the way is not known yet, or if a frame has not begun: the public functions pass that one over. */
static inline PyObject *known_place(const struct entry_codes *codes, long *instruction)
{
    const struct entry_layout *layout = &codes->layout;
    if (!layout->minor)
        return NULL;
    for (const char *frame = entry_innermost(layout); frame; frame = entry_caller(layout, frame)) {
        PyObject *code = entry_code(layout, frame);
        const int inside = is_known(codes, code);
        if (inside > 0)
            continue;
        *instruction = entry_instruction(layout, frame);
        return inside || *instruction < 0 ? NULL : code;
    }
    return NULL;
}

/* The place of the program that makes this thread's call: the code, a new reference; NULL if there is none, with an
 * exception if there is one. */
static PyObject *place(struct entry_codes *codes, long *instruction)
{
    PyObject *code = known_place(codes, instruction);
    if (code) {
        Py_INCREF(code);
        return code;
    }
    PyObject *frame = user_frame(codes, &code);
    if (!frame)
        return NULL;
    PyObject *given = codes->frames.lasti ? NULL : PyObject_GetAttr(frame, codes->f_lasti);
    if (codes->frames.lasti)
        *instruction = codes->frames.lasti(frame);
    else
        *instruction = given ? PyLong_AsLong(given) : -1;
    Py_XDECREF(given);
    Py_DECREF(frame);
    if (PyErr_Occurred())
        Py_CLEAR(code);
    return code;
}

static void set_site(struct entry_site *site, PyObject *code, PyObject *instruction)
{
    const struct entry_site old = *site;
    *site = (struct entry_site){code, instruction};
    Py_XDECREF(old.code);
    Py_XDECREF(old.instruction);
}

int entry_note_site(struct entry_codes *codes, struct entry_site *site)
{
    long instruction;
    PyObject *code = place(codes, &instruction);
    PyObject *number = code ? PyLong_FromLong(instruction) : NULL;
    if (PyErr_Occurred()) {
        Py_XDECREF(code);
        return -1;
    }
    set_site(site, code, number);
    return 0;
}

static int ask_for(struct entry_codes *codes, PyObject *code, long instruction, uint32_t *number)
{
    PyObject *answer = PyObject_CallFunction(codes->number_of, "Ol", code, instruction);
    if (!answer)
        return -1;
    const unsigned long given = PyLong_AsUnsignedLong(answer);
    Py_DECREF(answer);
    *number = (uint32_t)given;
    return given == (unsigned long)-1 && PyErr_Occurred() ? -1 : 0;
}

int entry_number_of(struct entry_codes *codes, PyObject *code, long instruction, uint32_t *number)
{
    const uintptr_t mixed = (uintptr_t)code / 64 + (uintptr_t)instruction / 2;
    __typeof__(&codes->sites[0]) known = &codes->sites[mixed % ENTRY_SITES];
    if (known->code == code && known->instruction == instruction) {
        *number = known->number;
        return 0;
    }
    Py_INCREF(code); /* the frame that lent it may go, with the others that run meanwhile */
    if (ask_for(codes, code, instruction, number)) {
        Py_DECREF(code);
        return -1;
    }
    PyObject *old = known->code;
    known->code = code;
    known->instruction = instruction;
    known->number = *number;
    Py_XDECREF(old);
    return 0;
}

int entry_site_number(struct entry_codes *codes, uint32_t *number)
{
    long instruction;
    PyObject *code = known_place(codes, &instruction);
    if (code)
        return entry_number_of(codes, code, instruction, number);
    *number = 0;
    code = place(codes, &instruction);
    if (!code)
        return PyErr_Occurred() ? -1 : 0;
    const int failed = entry_number_of(codes, code, instruction, number);
    Py_DECREF(code);
    return failed;
}
