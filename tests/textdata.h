/* Fixtures of text: files with one JSON object a line. */
#ifndef QL_TESTS_TEXTDATA_H
#define QL_TESTS_TEXTDATA_H

#include <jansson.h>
#include <stdint.h>

/* Calls `row` for each line. Returns the number of lines, or -1 with a message on stderr when the file is not readable
 * or a line is not a JSON object. */
int ql_test_rows(const char *path, void (*row)(void *user, const json_t *line), void *user);

/* The integers of an array member, in memory that is the caller's (free); *n is how many. NULL when it is no array. */
int32_t *ql_test_ints(const json_t *line, const char *key, int32_t *n);

#endif
