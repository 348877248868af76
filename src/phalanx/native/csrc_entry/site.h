/* Which line of the user's program is making a call, noted so cheaply that every call can: the code and the place in it.
 *
 * The line follows from these two, and is looked up only for an error (watch/call_site.py, which also says which frames
 * are passed over). */
#ifndef PHALANX_ENTRY_SITE_H
#define PHALANX_ENTRY_SITE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define ENTRY_CODES 32

/* What was learned about code, for one process. The interpreter's lock guards it. */
struct entry_codes {
    PyObject *is_inside;            /* asks watch/call_site.py about a frame */
    PyObject *inside[ENTRY_CODES];  /* code of torch's and ours, which is passed over */
    PyObject *outside;              /* the code that was found last: mostly it is the next one too */
    int next;                       /* the place in `inside` that is filled next */
};

/* A place in a program: both NULL if it is not known. */
struct entry_site {
    PyObject *code, *instruction;
};

/* Note where this thread's call comes from. Returns -1 with an exception. */
int entry_note_site(struct entry_codes *codes, struct entry_site *site);

#endif
