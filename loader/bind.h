/* The steps of opening a checkpoint, between its files. Nothing outside loader/ includes this. */
#ifndef QL_LOADER_BIND_H
#define QL_LOADER_BIND_H

#include "loader/checkpoint.h"
#include "loader/quant.h"

/* Texts that live as long as the checkpoint. */
struct ql_owned {
    ql_quant *quant;
    char *index; /* path of the index, or NULL */
    struct ql_text_block *texts;
};

/* A formatted text owned by the checkpoint, or NULL when memory ends. */
const char *ql_checkpoint_text(ql_checkpoint *c, const char *fmt, ...) QL_PRINTF(2, 3);

ql_status ql_checkpoint_add_note(ql_checkpoint *c, ql_error *err, const char *fmt, ...) QL_PRINTF(3, 4);

/* Marks tensor i as known and left out. */
void ql_checkpoint_leave_out(ql_checkpoint *c, int32_t i, const char *reason);
bool ql_checkpoint_is_left_out(const ql_checkpoint *c, int32_t i);

/* files.c: opens the files of c->dir and fills file, tensor and info; leaves out what the index does not list. */
ql_status ql_checkpoint_load_files(ql_checkpoint *c, ql_error *err);

/* bind.c: gives every tensor its role, or refuses. Needs config and files. */
ql_status ql_checkpoint_bind(ql_checkpoint *c, ql_error *err);

#endif
