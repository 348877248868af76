/* Noting which line of the user's program makes a call, so cheaply that every call can: the code and the place in it.
 *
 * The line follows from these two, and is looked up once for each place (call_site.py, which also says which frames
 * are passed over). */
#include "entry.h"

/* Return whether a frame is passed over: 1, 0, or -1 with an exception. */
static int is_inside(struct entry_codes *codes, PyFrameObject *frame, PyObject *code)
{
    __typeof__(&codes->known[0]) known = &codes->known[(uintptr_t)code / 64 % ENTRY_CODES];
    if (known->code == code)
        return known->inside;
    PyObject *answer = PyObject_CallFunctionObjArgs(codes->is_inside, (PyObject *)frame, NULL);
    const int inside = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (inside >= 0) {
        PyObject *old = known->code;
        Py_INCREF(code);
        known->code = code;
        known->inside = inside;
        Py_XDECREF(old); /* last: to free a code may run Python, which may come here */
    }
    return inside;
}

/* Not in the limited API; Python 3.10 lacks the second, and its frames have an attribute. */
PyFrameObject *PyFrame_GetBack(PyFrameObject *frame);
__attribute__((weak)) int PyFrame_GetLasti(PyFrameObject *frame);

static long instruction_of(PyFrameObject *frame)
{
    if (PyFrame_GetLasti)
        return PyFrame_GetLasti(frame);
    PyObject *given = PyObject_GetAttrString((PyObject *)frame, "f_lasti");
    const long instruction = given ? PyLong_AsLong(given) : -1;
    Py_XDECREF(given);
    return instruction;
}

int entry_is_called_by(PyObject *code)
{
    PyFrameObject *frame = PyEval_GetFrame(), *caller = frame ? PyFrame_GetBack(frame) : NULL;
    PyObject *found = caller ? (PyObject *)PyFrame_GetCode(caller) : NULL;
    Py_XDECREF(found);
    Py_XDECREF(caller);
    return found && found == code;
}

/* The place of the program that makes this thread's call: the code, a new reference; NULL if there is none, with an
 * exception if there is one. */
static PyObject *find_place(struct entry_codes *codes, long *instruction)
{
    PyFrameObject *frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        const int inside = is_inside(codes, frame, code);
        if (inside == 0) {
            *instruction = instruction_of(frame);
            Py_DECREF(frame);
            if (*instruction == -1 && PyErr_Occurred())
                Py_CLEAR(code);
            return code;
        }
        Py_DECREF(code);
        PyFrameObject *caller = inside < 0 ? NULL : PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = caller;
    }
    return NULL; /* torch's C++ made the call, on a thread of its own */
}

/* The number of a place, whose code the caller holds; as entry_site_number(). */
static int number_of(struct entry_codes *codes, PyObject *code, long instruction, uint32_t *number)
{
    const uintptr_t mixed = (uintptr_t)code / 64 + (uintptr_t)instruction / 2;
    __typeof__(&codes->sites[0]) known = &codes->sites[mixed % ENTRY_SITES];
    if (known->code == code && known->instruction == instruction) {
        *number = known->number;
        return 0;
    }
    PyObject *answer = PyObject_CallFunction(codes->number_of, "Ol", code, instruction);
    if (!answer)
        return -1;
    const unsigned long given = PyLong_AsUnsignedLong(answer);
    Py_DECREF(answer);
    *number = (uint32_t)given;
    if (given == (unsigned long)-1 && PyErr_Occurred())
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
    long instruction;
    *number = 0;
    PyObject *code = find_place(codes, &instruction);
    if (!code)
        return PyErr_Occurred() ? -1 : 0;
    const int failed = number_of(codes, code, instruction, number);
    Py_DECREF(code);
    return failed;
}

int entry_queued_site_number(struct entry_codes *codes, uint32_t *number)
{
    PyObject *queued = PyObject_GetAttr(codes->running, codes->site);
    if (!queued)
        return -1;
    int failed;
    if (PyTuple_Check(queued) && PyTuple_Size(queued) == 2)
        failed = number_of(codes, PyTuple_GetItem(queued, 0), PyLong_AsLong(PyTuple_GetItem(queued, 1)), number);
    else
        failed = entry_site_number(codes, number);
    Py_DECREF(queued);
    return failed;
}
