/* Walking the frames of a call up to the user's program. */
#include "site.h"

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

static void set_site(struct entry_site *site, PyObject *code, PyObject *instruction)
{
    const struct entry_site old = *site;
    *site = (struct entry_site){code, instruction};
    Py_XDECREF(old.code);
    Py_XDECREF(old.instruction);
}

int entry_note_site(struct entry_codes *codes, struct entry_site *site)
{
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame && frame != Py_None) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        const int inside = is_inside(codes, frame, code);
        PyObject *next = inside < 0 ? NULL : PyObject_GetAttrString(frame, inside ? "f_back" : "f_lasti");
        Py_DECREF(frame);
        if (next && !inside) {
            set_site(site, code, next);
            return 0;
        }
        Py_DECREF(code);
        if (!next)
            return -1;
        frame = next;
    }
    Py_XDECREF(frame);
    set_site(site, NULL, NULL); /* torch's C++ made the call, on a thread of its own */
    return 0;
}
