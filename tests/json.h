/* JSON in tests, written with single quotes so that it stands in C strings. */
#ifndef QL_TESTS_JSON_H
#define QL_TESTS_JSON_H

#include <jansson.h>

/* Any value; fails the running cmocka test if it is none. */
json_t *ql_test_json(const char *text);

#endif
