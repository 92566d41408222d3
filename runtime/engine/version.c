/* The version string. Compiled again whenever version, commit or CUDA support change: the Makefile passes all three. */
#include "runtime/qlane.h"

#if defined(QL_CUDA_VERSION) && defined(QL_NCCL_VERSION)
#define BUILT_WITH "CUDA " QL_CUDA_VERSION ", NCCL " QL_NCCL_VERSION
#else
#define BUILT_WITH "host only"
#endif

const char *ql_version(void) { return QL_VERSION " (" QL_COMMIT ", " BUILT_WITH ")"; }
