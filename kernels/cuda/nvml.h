/* What the driver's management library tells about a GPU. It is opened at run time; where it is missing, or has no answer,
 * fields stay as they are. No CUDA type crosses this header. */
#ifndef QL_KERNELS_CUDA_NVML_H
#define QL_KERNELS_CUDA_NVML_H

#include "runtime/qlane.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills clocks, power, temperature and the driver's version of the GPU at info->bus. */
void ql_nvml_describe(ql_lane_info *info);

#ifdef __cplusplus
}
#endif
#endif
