/* From what a user calls a model to the directory that holds it. */
#ifndef QL_RUNTIME_BASE_HUB_H
#define QL_RUNTIME_BASE_HUB_H

#include "runtime/base/status.h"

/* Finds the directory behind a path or Hub id ("org/name" in HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub, the
 * first of them that has the model; the snapshot of refs/main). *dir comes from malloc and is the caller's. */
ql_status ql_model_dir(const char *model, char **dir, ql_error *err);

#endif
