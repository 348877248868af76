/* What the test programs of RPC require: a condition that does not hold is printed, and ends the process. */
#ifndef PHALANX_TEST_CHECK_H
#define PHALANX_TEST_CHECK_H

#include <stdio.h>
#include <unistd.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

#endif
