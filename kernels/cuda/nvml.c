#include "kernels/cuda/nvml.h"

#include <dlfcn.h>
#include <string.h>

/* The few calls and numbers of nvml.h that are used; its ABI is stable. */
typedef void *nvml_device;
enum { NVML_OK = 0, NVML_CLOCK_SM = 1, NVML_CLOCK_MEMORY = 2, NVML_TEMPERATURE_GPU = 0 };

typedef struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_bus)(const char *bus, nvml_device *device);
    int (*driver)(char *text, unsigned cap);
    int (*clock)(nvml_device device, int type, unsigned *mhz);
    int (*max_clock)(nvml_device device, int type, unsigned *mhz);
    int (*power)(nvml_device device, unsigned *mw);
    int (*power_limit)(nvml_device device, unsigned *mw);
    int (*temperature)(nvml_device device, int sensor, unsigned *celsius);
} nvml;

static int open_library(nvml *n) {
    memset(n, 0, sizeof *n);
    n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    const struct {
        const char *name;
        void *at;
    } entries[] = {
        {"nvmlInit_v2", &n->init},
        {"nvmlShutdown", &n->shutdown},
        {"nvmlDeviceGetHandleByPciBusId_v2", &n->by_bus},
        {"nvmlSystemGetDriverVersion", &n->driver},
        {"nvmlDeviceGetClockInfo", &n->clock},
        {"nvmlDeviceGetMaxClockInfo", &n->max_clock},
        {"nvmlDeviceGetPowerUsage", &n->power},
        {"nvmlDeviceGetEnforcedPowerLimit", &n->power_limit},
        {"nvmlDeviceGetTemperature", &n->temperature},
    };
    for (size_t i = 0; n->library && i < sizeof entries / sizeof *entries; i++) {
        void *f = dlsym(n->library, entries[i].name);
        if (!f) {
            dlclose(n->library);
            n->library = NULL;
            break;
        }
        memcpy(entries[i].at, &f, sizeof f); /* an object pointer is a function pointer on this system */
    }
    return n->library != NULL;
}

static void ask(const nvml *n, nvml_device device, ql_lane_info *info) {
    unsigned v;
    if (n->clock(device, NVML_CLOCK_SM, &v) == NVML_OK) {
        info->sm_mhz = (int32_t)v;
    }
    if (n->max_clock(device, NVML_CLOCK_SM, &v) == NVML_OK) {
        info->sm_max_mhz = (int32_t)v;
    }
    if (n->clock(device, NVML_CLOCK_MEMORY, &v) == NVML_OK) {
        info->memory_mhz = (int32_t)v;
    }
    if (n->power(device, &v) == NVML_OK) {
        info->power_w = v * 1e-3;
    }
    if (n->power_limit(device, &v) == NVML_OK) {
        info->power_limit_w = v * 1e-3;
    }
    if (n->temperature(device, NVML_TEMPERATURE_GPU, &v) == NVML_OK) {
        info->temperature_c = (int32_t)v;
    }
}

void ql_nvml_describe(ql_lane_info *info) {
    nvml n;
    nvml_device device;
    if (!open_library(&n)) {
        return;
    }
    if (n.init() == NVML_OK) {
        if (n.driver(info->driver, sizeof info->driver) != NVML_OK) {
            info->driver[0] = 0;
        }
        if (n.by_bus(info->bus, &device) == NVML_OK) {
            ask(&n, device, info);
        }
        n.shutdown();
    }
    dlclose(n.library);
}
