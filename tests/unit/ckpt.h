/* A checkpoint to change, for the tests of opening one.
 *
 * A case takes the headers and configuration of a bundled model, changes one thing, writes the result as sparse files into a folder of
 * the program's own and asserts the text of the refusal, or what was decided. What goes wrong on the way fails the running test.
 */
#ifndef QL_TESTS_UNIT_CKPT_H
#define QL_TESTS_UNIT_CKPT_H

#include "loader/checkpoint.h"
#include "tests/stfile.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#define LEN(a) (sizeof(a) / sizeof *(a))
#define P "model.language_model."

/* Bundled models by what is in them. */
extern const char ck_mixed[], ck_block[], ck_modelopt[], ck_bf16[];

enum { CK_MAX_FILES = 4 };

typedef struct ck_model {
    json_t *config, *map; /* map: NULL without an index */
    int n_file;
    char name[CK_MAX_FILES][64];
    ql_stfile file[CK_MAX_FILES];
} ck_model;

void ck_must(ql_status status, const ql_error *err);
void ck_contains(const char *text, const char *part);

/* ---- the folder: made before the first test of the group, and removed after the last */

extern char ck_folder[];
int ck_set_up(void **state);
int ck_tear_down(void **state);
void ck_clear_folder(void);

/* What is in it now. */
void ck_folder_refused(const char *a, const char *b);
ql_checkpoint *ck_folder_opened(void);

/* ---- changes */

ck_model ck_load(const char *dir);
void ck_free(ck_model *model);

/* Where the index has a tensor, not whether it is there. */
void ck_map(ck_model *model, const char *name, const char *file);
void ck_drop(ck_model *model, const char *name);
/* Into the first file. rank 0 to 2. */
void ck_add(ck_model *model, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k);
void ck_rename(ck_model *model, const char *name, const char *other);
void ck_reshape(ck_model *model, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k);
/* Replaces a linear's tensors by plain BF16. */
void ck_make_plain(ck_model *model, const char *module, int64_t n, int64_t k);
void ck_set_config(ck_model *model, const char *key, json_t *value);
/* Of the configuration, borrowed. */
json_t *ck_quantization(ck_model *model);
json_t *ck_targets(ck_model *model, const char *group);

/* ---- what comes of it */

/* Into an empty folder. */
void ck_write(ck_model *model);

/* Write and free the model, and open what was written. */
void ck_refused(ck_model *model, const char *a, const char *b);
ql_checkpoint *ck_opened(ck_model *model);

/* One tensor of another shape or dtype is enough to be refused in these words. */
void ck_reshaped_refused(const char *dir, const char *name, ql_dtype dtype, int rank, int64_t n, int64_t k,
                         const char *a, const char *b);

/* One note contains both. */
void ck_has_note(const ql_checkpoint *c, const char *a, const char *b);
ql_tensor_info ck_info(const ql_checkpoint *c, const char *name);

#endif
