/* Walking the frames of a call up to the user's program. */
#define _GNU_SOURCE
#include "site.h"

#include <dlfcn.h>

static int is_known(struct entry_codes *codes, PyObject *code)
{
    for (int i = 0; i < ENTRY_CODES; i++)
        if (codes->inside[i] == code)
            return 1;
    return 0;
}

/* Whether a frame is passed over: 1, 0, or -1 with an exception. */
static int is_inside(struct entry_codes *codes, PyObject *frame, PyObject *code)
{
    if (code == codes->outside)
        return 0;
    if (is_known(codes, code))
        return 1;
    PyObject *answer = PyObject_CallFunctionObjArgs(codes->is_inside, frame, NULL);
    if (!answer)
        return -1;
    const int inside = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    if (inside < 0)
        return -1;
    PyObject **slot = inside ? &codes->inside[codes->next++ % ENTRY_CODES] : &codes->outside;
    PyObject *old = *slot;
    Py_INCREF(code); /* held, so that no other code gets its address */
    *slot = code;
    Py_XDECREF(old);
    return inside;
}

int entry_find_frames(struct entry_codes *codes)
{
    codes->back = (__typeof__(codes->back))dlsym(RTLD_DEFAULT, "PyFrame_GetBack");
    codes->lasti = (__typeof__(codes->lasti))dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");
    codes->f_back = PyUnicode_InternFromString("f_back");
    codes->f_lasti = PyUnicode_InternFromString("f_lasti");
    return codes->f_back && codes->f_lasti ? 0 : -1;
}

/* The frame that called `frame`, or NULL; with an exception if there is one. */
static PyObject *caller_of(struct entry_codes *codes, PyObject *frame)
{
    if (codes->back)
        return codes->back(frame);
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

static void set_site(struct entry_site *site, PyObject *code, PyObject *instruction)
{
    const struct entry_site old = *site;
    *site = (struct entry_site){code, instruction};
    Py_XDECREF(old.code);
    Py_XDECREF(old.instruction);
}

int entry_note_site(struct entry_codes *codes, struct entry_site *site)
{
    PyObject *code = NULL, *frame = user_frame(codes, &code);
    if (!frame) {
        if (PyErr_Occurred())
            return -1;
        set_site(site, NULL, NULL);
        return 0;
    }
    PyObject *instruction = PyObject_GetAttr(frame, codes->f_lasti);
    Py_DECREF(frame);
    if (!instruction) {
        Py_DECREF(code);
        return -1;
    }
    set_site(site, code, instruction);
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
    if (ask_for(codes, code, instruction, number)) /* other threads may run meanwhile */
        return -1;
    PyObject *old = known->code;
    Py_INCREF(code);
    known->code = code;
    known->instruction = instruction;
    known->number = *number;
    Py_XDECREF(old);
    return 0;
}

int entry_site_number(struct entry_codes *codes, uint32_t *number)
{
    PyObject *code = NULL, *frame = user_frame(codes, &code);
    *number = 0;
    if (!frame)
        return PyErr_Occurred() ? -1 : 0;
    long instruction = -1;
    if (codes->lasti) {
        instruction = codes->lasti(frame);
    } else {
        PyObject *given = PyObject_GetAttr(frame, codes->f_lasti);
        instruction = given ? PyLong_AsLong(given) : -1;
        Py_XDECREF(given);
    }
    Py_DECREF(frame);
    const int failed = PyErr_Occurred() ? -1 : entry_number_of(codes, code, instruction, number);
    Py_DECREF(code);
    return failed;
}
