/* Learning where the interpreter keeps its frames, without trusting that it does. */
#define _GNU_SOURCE
#include "frames.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* In 3.10 frames are objects anyway; those of 3.14 have not been tried. */
static const struct entry_layout LAYOUTS[] = {
    {.minor = 11, .of_thread = 56, .of_holder = 8, .code = 32, .previous = 48, .instruction = 56, .owner = 69,
     .instructions = 184},
    {.minor = 12, .of_thread = 56, .of_holder = 0, .code = 0, .previous = 8, .instruction = 56, .owner = 70,
     .instructions = 192},
    {.minor = 13, .of_thread = 72, .of_holder = -1, .code = 0, .previous = 8, .instruction = 56, .owner = 70,
     .instructions = 200},
};

/* Of this Python: NULL if none is known. A build for debugging, or without the interpreter's lock, has flags; a version
 * that was not released has a letter after its number. */
static const struct entry_layout *expected(void)
{
    int minor;
    char flag = 0;
    PyObject *flags = PySys_GetObject("abiflags"); /* borrowed */
    if (sizeof(void *) != 8 || sscanf(Py_GetVersion(), "3.%d.%*d%c", &minor, &flag) != 2 || flag != ' ' || !flags ||
        PyUnicode_CompareWithASCIIString(flags, ""))
        return NULL;
    for (size_t i = 0; i < sizeof LAYOUTS / sizeof *LAYOUTS; i++)
        if (LAYOUTS[i].minor == minor)
            return &LAYOUTS[i];
    return NULL;
}

/* Memory that may not be there is read through a pipe: the kernel reports what would end the process. */
struct reader {
    const struct entry_layout *layout;
    int pipe[2];
    int failed; /* to read, or to find what the public functions say */
};

static void peek(struct reader *reader, const char *from, uint16_t at, void *out, size_t size)
{
    memset(out, 0, size);
    if (reader->failed || write(reader->pipe[1], from + at, size) != (ssize_t)size ||
        read(reader->pipe[0], out, size) != (ssize_t)size)
        reader->failed = 1;
}

static const char *peek_at(struct reader *reader, const char *from, uint16_t at)
{
    const char *found;
    peek(reader, from, at, &found, sizeof found);
    return found;
}

static const char *peek_python_frame(struct reader *reader, const char *frame)
{
    for (char owner = 0; frame; frame = peek_at(reader, frame, reader->layout->previous)) {
        peek(reader, frame, reader->layout->owner, &owner, sizeof owner);
        if (owner != ENTRY_NO_PYTHON)
            break;
    }
    return frame;
}

/* Compare a frame with Python's object of it. */
static void compare(struct reader *reader, const char *frame, PyObject *object, const struct entry_public_frames *known)
{
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)object);
    const char *there = peek_at(reader, frame, reader->layout->code);
    const char *at = peek_at(reader, frame, reader->layout->instruction);
    if (there != (const char *)code || at - (there + reader->layout->instructions) != known->lasti(object))
        reader->failed = 1;
    Py_DECREF(code);
}

/* Compare the whole stack. */
static void compare_all(struct reader *reader, const struct entry_public_frames *known)
{
    PyObject *object = (PyObject *)PyEval_GetFrame();
    Py_XINCREF(object);
    const char *frame = peek_at(reader, (const char *)PyThreadState_Get(), reader->layout->of_thread);
    if (reader->layout->of_holder >= 0)
        frame = peek_at(reader, frame, (uint16_t)reader->layout->of_holder);
    int compared = 0;
    while ((frame = peek_python_frame(reader, frame)) && object && !reader->failed) {
        compare(reader, frame, object, known);
        PyObject *caller = known->back(object);
        Py_DECREF(object);
        object = caller;
        frame = peek_at(reader, frame, reader->layout->previous);
        compared++;
    }
    if (frame || object || compared < 2)
        reader->failed = 1;
    Py_XDECREF(object);
}

struct entry_layout entry_learn_layout(const struct entry_public_frames *known)
{
    const struct entry_layout unknown = {0};
    struct reader reader = {.layout = expected()};
    if (!reader.layout || !known->back || !known->lasti || pipe2(reader.pipe, O_CLOEXEC | O_NONBLOCK))
        return unknown;
    compare_all(&reader, known);
    close(reader.pipe[0]);
    close(reader.pipe[1]);
    return reader.failed ? unknown : *reader.layout;
}
