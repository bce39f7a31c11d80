/* Answers as NVML does, for the calls of clustertune/monitor/sampler.py. State comes from the file $FAKE_NVML, read at every call:
   "count util memory_mib milliwatt temperature mhz throttle energy_mj lost xid init". lost: a GPU that is off the bus, or -1. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, TIMEOUT = 10, LOST = 15 };
typedef struct { int index; } *Device;
static struct { int index; } gpus[64];
static long s[11];

static void look(void) {
    FILE *f = fopen(getenv("FAKE_NVML"), "r");
    for (int i = 0; f && i < 11; i++)
        if (fscanf(f, "%ld", &s[i]) != 1) break;
    if (f) fclose(f);
}
static int gone(Device d) { look(); return d->index == s[8] ? LOST : OK; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; look(); return (int)s[10]; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "other"; }
int nvmlDeviceGetCount_v2(unsigned *n) { look(); *n = (unsigned)s[0]; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device *d) {
    look();
    if (i >= (unsigned)s[0]) return INVALID;
    gpus[i].index = (int)i; *d = (Device)&gpus[i]; return OK;
}
int nvmlDeviceGetName(Device d, char *name, unsigned n) { snprintf(name, n, "NVIDIA H100 80GB HBM3"); return gone(d); }
int nvmlDeviceGetUtilizationRates(Device d, unsigned u[2]) { u[0] = (unsigned)s[1] + d->index; u[1] = 1; return gone(d); }
int nvmlDeviceGetMemoryInfo(Device d, uint64_t m[3]) { m[0] = 80ull << 30; m[2] = (uint64_t)s[2] << 20; return gone(d); }
int nvmlDeviceGetPowerUsage(Device d, unsigned *p) { *p = (unsigned)s[3]; return gone(d); }
int nvmlDeviceGetTemperature(Device d, int sensor, unsigned *t) { (void)sensor; *t = (unsigned)s[4]; return gone(d); }
int nvmlDeviceGetClockInfo(Device d, int kind, unsigned *c) { *c = kind == 1 ? (unsigned)s[5] : 7; return gone(d); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device d, uint64_t *r) { *r = (uint64_t)s[6]; return gone(d); }
int nvmlDeviceGetTotalEccErrors(Device d, int e, int c, uint64_t *n) { (void)e; (void)c; (void)n; return gone(d) ? LOST : UNSUPPORTED; }
int nvmlDeviceGetTotalEnergyConsumption(Device d, uint64_t *mj) {
    *mj = (uint64_t)s[7];
    return gone(d) ? LOST : s[7] < 0 ? UNSUPPORTED : OK;
}

typedef struct { Device device; uint64_t type, data; unsigned gi, ci; } Event;
static int told;
int nvmlEventSetCreate(void **set) { *set = &told; return OK; }
int nvmlDeviceRegisterEvents(Device d, uint64_t types, void *set) { (void)d; (void)set; return types == 8 ? OK : INVALID; }
int nvmlEventSetWait_v2(void *set, Event *e, unsigned ms) {
    (void)set; (void)ms; look();
    if (!s[9] || told) return TIMEOUT;
    told = 1; memset(e, 0, sizeof *e); e->device = (Device)&gpus[1]; e->type = 8; e->data = (uint64_t)s[9];
    return OK;
}
