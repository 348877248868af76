/* Reading the frames of this thread's stack where the interpreter keeps them.
 *
 * Python makes an object of a frame only when somebody asks for one. To have those made of a call's frames, up to the
 * one of the user's program, takes 0.1 us, eight times as long as to look at the frames themselves. Where these are is
 * the interpreter's own affair, but the releases of one minor version agree on it. So it is written down here for some
 * minor versions, and believed only if in this process it has given the same codes and instructions, of a whole stack,
 * as the public functions do. Else those are used. */
#ifndef PHALANX_ENTRY_FRAMES_H
#define PHALANX_ENTRY_FRAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Where things are, in bytes from the beginning of what they are in. */
struct entry_layout {
    int minor;                                   /* of the Python that has it; 0: the layout is not known */
    uint16_t of_thread;                          /* in the thread's state: the innermost frame, or what holds it */
    int16_t of_holder;                           /* the innermost frame there; -1: nothing holds it */
    uint16_t code, previous, instruction, owner; /* in a frame */
    uint16_t instructions;                       /* in a code: the first one */
};

/* `owner` of a frame that has no code and stands for a call from C; from 3.12 on. */
#define ENTRY_NO_PYTHON 3

/* What the public functions say of frames. */
struct entry_public_frames {
    PyObject *(*back)(PyObject *frame); /* PyFrame_GetBack and PyFrame_GetLasti, which the limited API lacks */
    int (*lasti)(PyObject *frame);
};

/* The layout that is known here for this Python, if the stack of this thread agrees, which must have two frames at
 * least; else one of `minor` 0. */
struct entry_layout entry_learn_layout(const struct entry_public_frames *known);

static inline const char *entry_read_at(const char *from, uint16_t at)
{
    const char *found;
    memcpy(&found, from + at, sizeof found);
    return found;
}

static inline const char *entry_python_frame(const struct entry_layout *layout, const char *frame)
{
    while (frame && frame[layout->owner] == ENTRY_NO_PYTHON)
        frame = entry_read_at(frame, layout->previous);
    return frame;
}

/* The innermost frame of this thread, which has the interpreter's lock; NULL if there is none. */
static inline const char *entry_innermost(const struct entry_layout *layout)
{
    const char *at = entry_read_at((const char *)PyThreadState_Get(), layout->of_thread);
    return entry_python_frame(layout, layout->of_holder < 0 ? at : entry_read_at(at, (uint16_t)layout->of_holder));
}

static inline const char *entry_caller(const struct entry_layout *layout, const char *frame)
{
    return entry_python_frame(layout, entry_read_at(frame, layout->previous));
}

/* The code of a frame, borrowed from it. */
static inline PyObject *entry_code(const struct entry_layout *layout, const char *frame)
{
    return (PyObject *)(uintptr_t)entry_read_at(frame, layout->code);
}

/* What f_lasti of its object would be. */
static inline long entry_instruction(const struct entry_layout *layout, const char *frame)
{
    return (long)(entry_read_at(frame, layout->instruction) -
                  (entry_read_at(frame, layout->code) + layout->instructions));
}

#endif
