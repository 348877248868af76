/* Noting which line of the user's program makes a call, so cheaply that every call can: the code and the place in it.
 *
 * The line follows from these two, and is looked up once for each place (call_site.py, which also says which frames
 * are passed over). */
#ifndef PHALANX_ENTRY_SITE_H
#define PHALANX_ENTRY_SITE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define ENTRY_CODES 1024
#define ENTRY_SITES 256

/* What was learned about code, for one process. The interpreter's lock guards it. */
struct entry_codes {
    PyObject *is_inside;            /* asks diagnosis/call_site.py about a frame */
    struct {
        PyObject *code;             /* held; NULL: free */
        int inside;                 /* it is torch's or ours, and passed over */
    } known[ENTRY_CODES];
    size_t count;
    /* PyFrame_GetBack and PyFrame_GetLasti, which the limited API lacks. NULL in Python 3.10: frames have attributes.
     */
    PyObject *(*back_of)(PyObject *frame);
    int (*lasti_of)(PyObject *frame);
    PyObject *f_back, *f_lasti;     /* interned names */
    PyObject *number_of;            /* gives the number of a place (recorder.py) */
    struct {
        PyObject *code;             /* held */
        long instruction;
        uint32_t number;
    } sites[ENTRY_SITES];           /* numbers that were asked for before */
};

/* Find those functions; once, before any call here. Returns -1 with an exception. */
int entry_find_frames(struct entry_codes *codes);

/* The frame that called `frame`, a new reference, or NULL; with an exception if there is one. */
PyObject *entry_caller_of(struct entry_codes *codes, PyObject *frame);

/* The recorder's number of a place, whose code the caller holds; 0 if there is none. Returns -1 with an exception,
 * which may be a signal handler's: a new place is looked up in Python, where handlers run. So the place is found
 * before anything of the call is begun. */
int entry_number_of(struct entry_codes *codes, PyObject *code, long instruction, uint32_t *number);

/* The same for the place where this thread's call comes from; 0 if it is not known. */
int entry_site_number(struct entry_codes *codes, uint32_t *number);

#endif
