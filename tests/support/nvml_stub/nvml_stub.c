// A stand-in for libnvidia-ml.so.1: NVML without a GPU, for tests.
//
// NVML_STUB_CONFIG names a file of key=value lines. It is read again at every call, so that a test can break a GPU
// while a process runs. CALL is the string beside a symbol below, KEY the one given to text() or get().
//
//   driver= cuda= nvml= count=               the machine
//   gpu0.KEY=       else gpu.KEY=            one GPU, else the default for all of them
//   gpu0.mig1.KEY=  else gpu.mig1.KEY=       one MIG slice of it; a slice exists if it has memory_mib
//   ret.CALL=  gpu0.ret.CALL=  gpu0.ret=     answer this NVML error number: to a call, to a call on a GPU, to all on it
//   hang.CALL=1 (and the same places)        do not answer until the key is 0 or gone
//   crash.CALL=1 (and the same places)       kill this process
//
// A value that is not given, or is empty, is NVML_ERROR_NOT_SUPPORTED: what a profile leaves out, its GPU cannot do.
#define _POSIX_C_SOURCE 200809L
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { VERSION_MISMATCH = 25, UNKNOWN = 999, XID_EVENT = 8, NO_INSTANCE = -1 };
enum { MAX_GPUS = 32, MAX_SLICES = 8, POLL_MS = 10 };

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { char legacy_bus_id[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version; int celsius; } Margin;
typedef struct { unsigned id, scope; int64_t timestamp, latency; unsigned type, error; int64_t value; } Field;
typedef struct { unsigned version; u64 counts[11]; unsigned exceeded; } Sram;
typedef struct { unsigned version; uint8_t cluster[16]; unsigned status, clique, state, mask; uint8_t summary; } Fabric;
typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { char *device; u64 type, data; unsigned gpu_instance, compute_instance; } Event;
typedef struct { u64 types[MAX_GPUS]; unsigned seen[MAX_GPUS]; } EventSet;

// Not part of NVML: lets a test hold these sizes against pynvml's.
const struct { const char *name; size_t size; } nvml_stub_sizes[] = {
    {"c_nvmlMemory_t", sizeof(Memory)}, {"c_nvmlMemory_v2_t", sizeof(Memory2)}, {"nvmlPciInfo_t", sizeof(Pci)},
    {"c_nvmlUtilization_t", sizeof(Utilization)}, {"c_nvmlMarginTemperature_v1_t", sizeof(Margin)},
    {"c_nvmlFieldValue_t", sizeof(Field)}, {"c_nvmlEccSramErrorStatus_v1_t", sizeof(Sram)},
    {"c_nvmlGpuFabricInfo_v2_t", offsetof(Fabric, summary)}, {"c_nvmlGpuFabricInfo_v3_t", sizeof(Fabric)},
    {"c_nvmlProcessInfo_v3_t", sizeof(Process)}, {"c_nvmlEventData_t", sizeof(Event)}, {NULL, 0},
};

// A handle is an address on this board: the row is the GPU; column 0 is all of it, column 1 + n its MIG slice n.
typedef char *Device;
static char board[MAX_GPUS][1 + MAX_SLICES];
static atomic_int initialized;

// ---- The file, and the call in progress: each thread has its own, as pynvml holds no lock ----

static _Thread_local char config[1 << 16];  // lines, each ended by a NUL
static _Thread_local size_t config_size;
static _Thread_local struct { const char *name; int gpu, slice, error; char own[32], all[32], whole[32]; } call;

static int fail(int error) { return call.error = call.error ? call.error : error; }  // the first one is the answer
static void sleep_ms(long ms) { nanosleep(&(struct timespec){0, ms * 1000000}, NULL); }

static void load_config(void) {
    const char *path = getenv("NVML_STUB_CONFIG");
    FILE *file = path ? fopen(path, "r") : NULL;
    config_size = file ? fread(config, 1, sizeof config - 1, file) : 0;
    config[config_size] = '\0';
    for (char *c = config; (c = strchr(c, '\n')); c++) *c = '\0';
    if (file) fclose(file);
    if (file && config_size < sizeof config - 1) return;
    fprintf(stderr, "nvml stub: cannot read NVML_STUB_CONFIG=%s\n", path ? path : "");
    fail(UNKNOWN);
}

static const char *find(const char *scope, const char *key) {
    const char *found = NULL;  // of two lines the later one counts, so that a line can be appended
    size_t head = strlen(scope), tail = strlen(key);
    for (const char *line = config; line < config + config_size; line += strlen(line) + 1)
        if (!strncmp(line, scope, head) && !strncmp(line + head, key, tail) && line[head + tail] == '=')
            found = line + head + tail + 1;
    return found;
}

__attribute__((format(printf, 1, 2))) static const char *text(const char *format, ...) {
    char key[64];
    va_list args;
    va_start(args, format);
    vsnprintf(key, sizeof key, format, args);
    va_end(args);
    const char *own = find(call.own, key), *value = own ? own : find(call.all, key);
    return value && *value ? value : NULL;
}

static const char *or(const char *value, const char *fallback) { return value ? value : fallback; }

static long long number(const char *value) {
    char *end;
    long long result = value ? strtoll(value, &end, 0) : fail(NOT_SUPPORTED);
    if (value && *end) fprintf(stderr, "nvml stub: not a number: %s\n", value), fail(UNKNOWN);
    return call.error ? 0 : result;
}
#define get(...) number(text(__VA_ARGS__))
#define get_or_0(...) number(or(text(__VA_ARGS__), "0"))

static int copy(const char *value, char *out, unsigned size) {
    if (!value) fail(NOT_SUPPORTED);
    else if (snprintf(out, size, "%s", value) >= (int)size) fail(INSUFFICIENT_SIZE);
    return call.error;
}

static const char *pick(const char *const *names, unsigned index) {  // names end with NULL
    while (*names && index--) names++;
    if (!*names) fail(INVALID_ARGUMENT);
    return or(*names, "");
}

static int check_version(unsigned given, unsigned version, size_t size) {
    return given == (version << 24 | size) ? call.error : fail(VERSION_MISMATCH);
}

static int fault(const char *kind) {
    char this_call[64];
    snprintf(this_call, sizeof this_call, "%s.%s", kind, call.name);
    const char *here = or(text("%s", this_call), text("%s", kind));
    return atoi(or(here, or(or(find(call.whole, kind), find("", this_call)), "")));
}

static void enter(int gpu, int slice) {
    char mig[16] = "";
    call.gpu = gpu, call.slice = slice, call.own[0] = call.all[0] = call.whole[0] = '\0';
    if (slice >= 0) snprintf(mig, sizeof mig, "mig%d.", slice);
    if (gpu < 0) return;
    snprintf(call.own, sizeof call.own, "gpu%d.%s", gpu, mig);
    snprintf(call.all, sizeof call.all, "gpu.%s", mig);
    snprintf(call.whole, sizeof call.whole, "gpu%d.", gpu);  // a fault of the GPU is one of its slices
}

static int begin(const char *name, int gpu, int slice) {
    enter(gpu, slice);
    call.name = name, call.error = 0;
    for (load_config(); fault("hang"); load_config()) sleep_ms(POLL_MS);
    if (fault("crash")) raise(SIGKILL);  // as a crash, but without a core file
    fail(fault("ret"));
    return fail(initialized || !strcmp(name, "init") ? 0 : UNINITIALIZED);
}

static int on_machine(const char *name) { return begin(name, -1, -1); }

static int on_device(const char *name, Device device) {
    uintptr_t place = (uintptr_t)device - (uintptr_t)board, row = sizeof board[0];
    if (place < sizeof board) return begin(name, place / row, (int)(place % row) - 1);
    return on_machine(name), fail(INVALID_ARGUMENT);
}

// ---- The machine ----

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!on_machine("init")) initialized++;
    return call.error;
}
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!on_machine("shutdown")) initialized--;
    return call.error;
}

const char *nvmlErrorString(int error) {
    static _Thread_local char message[32];  // pynvml has its own texts for the usual ones
    snprintf(message, sizeof message, "NVML error %d (stub)", error);
    return message;
}

#define ON_MACHINE(symbol, name, params, ...) \
    int symbol params { on_machine(name); __VA_ARGS__; return call.error; }

ON_MACHINE(nvmlSystemGetNVMLVersion, "nvml", (char *out, unsigned size), copy(text("nvml"), out, size))
ON_MACHINE(nvmlSystemGetCudaDriverVersion_v2, "cuda", (int *out), *out = get("cuda"))
ON_MACHINE(nvmlDeviceGetCount_v2, "count", (unsigned *out), *out = get("count"))
ON_MACHINE(nvmlSystemGetDriverVersion, "driver", (char *out, unsigned size),
    if (!copy(text("driver"), out, size)) copy(" (stub)", out + strlen(out), size - strlen(out)))  // seen in any output

// ---- One device: a row is a symbol, its CALL, its parameters, and what it stores ----

#define ON_DEVICE(symbol, name, params, ...) \
    int symbol params { on_device(name, device); __VA_ARGS__; return call.error; }
#define TEXT(symbol, key) ON_DEVICE(symbol, key, (Device device, char *out, unsigned size), copy(text(key), out, size))
#define NUMBER(symbol, type, key) ON_DEVICE(symbol, key, (Device device, type *out), *out = get(key))

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetInforomImageVersion, "inforom")

NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power_mw")
NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, "energy_mj")  // since the driver was loaded
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence_mode")
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie.width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie.max_width")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie.generation")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "pcie.max_generation")
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie.replays")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, "retired_pages.pending")
NUMBER(nvmlDeviceGetSupportedEventTypes, u64, "event_types")
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, "clocks_event_reasons")
ON_DEVICE(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks_throttle_reasons", (Device device, u64 *out),
    *out = get("clocks_event_reasons"))  // the older name of the same value

static Memory2 memory(void) {
    u64 total = get("memory_mib") << 20, used = get_or_0("memory_used_mib") << 20;
    u64 reserved = get_or_0("memory_reserved_mib") << 20;
    return (Memory2){2 << 24 | sizeof(Memory2), total, reserved, total - used - reserved, used};
}
ON_DEVICE(nvmlDeviceGetMemoryInfo, "memory", (Device device, Memory *out),
    *out = (Memory){memory().total, memory().free, memory().used + memory().reserved})  // here reserved counts as used
ON_DEVICE(nvmlDeviceGetMemoryInfo_v2, "memory_v2", (Device device, Memory2 *out),
    if (!check_version(out->version, 2, sizeof *out)) *out = memory())
ON_DEVICE(nvmlDeviceGetClockInfo, "clock", (Device device, unsigned kind, unsigned *out),
    static const char *const names[] = {"graphics", "sm", "mem", NULL};
    *out = get("clock.%s", pick(names, kind)))
ON_DEVICE(nvmlDeviceGetUtilizationRates, "utilization", (Device device, Utilization *out),
    *out = (Utilization){get("utilization.gpu"), get("utilization.memory")})
ON_DEVICE(nvmlDeviceGetTemperature, "temperature", (Device device, unsigned sensor, unsigned *out),
    *out = sensor ? fail(INVALID_ARGUMENT) : get("temperature"))
ON_DEVICE(nvmlDeviceGetMarginTemperature, "margin", (Device device, Margin *out),
    if (!check_version(out->version, 1, sizeof *out)) out->celsius = get("margin"))
ON_DEVICE(nvmlDeviceGetTemperatureThreshold, "threshold", (Device device, unsigned threshold, unsigned *out),
    static const char *const names[] = {"shutdown", "slowdown", "mem_max", "gpu_max", NULL};
    *out = get("threshold.%s", pick(names, threshold)))
ON_DEVICE(nvmlDeviceGetCudaComputeCapability, "compute_capability", (Device device, int *major, int *minor),
    if (sscanf(or(text("compute_capability"), ""), "%d.%d", major, minor) != 2) fail(NOT_SUPPORTED))
ON_DEVICE(nvmlDeviceGetPciInfo_v3, "pci", (Device device, Pci *out),
    if (call.slice >= 0) return fail(NOT_SUPPORTED);
    *out = (Pci){.bus = 7 + 8 * call.gpu, .id = get_or_0("pci_device_id")};
    sscanf(or(text("pci_bus_id"), ""), "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
    memcpy(out->legacy_bus_id, out->bus_id + 4, sizeof out->legacy_bus_id - 1))  // its domain has four digits
ON_DEVICE(nvmlDeviceGetFieldValues, "field", (Device device, int count, Field *fields),
    if (call.error) return call.error;
    for (Field *field = fields; field < fields + count; field++, call.error = 0) {  // each succeeds or fails alone
        fail(get_or_0("ret.field.%u", field->id));
        field->value = get("field.%u", field->id), field->error = call.error;
        field->type = field->value < 0 ? 5 : field->value > UINT32_MAX ? 3 : 1;  // signed int, u64, unsigned int
        field->timestamp = time(NULL) * 1000000;
    })
ON_DEVICE(nvmlDeviceGetComputeRunningProcesses_v3, "processes", (Device device, unsigned *count, Process *out),
    const char *list = or(text("processes"), "");  // "pid:mib,pid:mib"; not given is none running
    unsigned room = out ? *count : 0, found = 0, pid, mib;
    for (int width; sscanf(list, "%u:%u%n", &pid, &mib, &width) == 2; found++, list += width + (list[width] == ','))
        if (found < room) out[found] = (Process){pid, (u64)mib << 20, NO_INSTANCE, NO_INSTANCE};
    *count = found;
    fail(found > room ? INSUFFICIENT_SIZE : 0))

// ---- Handles and MIG ----

static const char *uuid(char derived[64]) {
    if (call.slice < 0) snprintf(derived, 64, "GPU-00000000-0000-0000-0000-%012d", call.gpu);
    else snprintf(derived, 64, "MIG-00000000-0000-0000-%04d-%012d", call.gpu, call.slice);
    return or(text("uuid"), derived);
}
ON_DEVICE(nvmlDeviceGetUUID, "uuid", (Device device, char *out, unsigned size),
    char derived[64];
    copy(uuid(derived), out, size))
ON_MACHINE(nvmlDeviceGetHandleByIndex_v2, "handle", (unsigned index, Device *out),
    if (index >= MAX_GPUS || index >= get("count")) return fail(INVALID_ARGUMENT);
    on_device("handle", *out = board[index]))
ON_MACHINE(nvmlDeviceGetHandleByUUID, "handle", (const char *wanted, Device *out),
    char derived[64];
    int count = get("count");
    for (int gpu = 0; gpu < count && gpu < MAX_GPUS; gpu++)
        for (int slice = -1; slice < MAX_SLICES; slice++) {
            enter(gpu, slice);
            if ((slice < 0 || text("memory_mib")) && !strcmp(uuid(derived), wanted))
                return on_device("handle", *out = &board[gpu][1 + slice]);
        }
    fail(NOT_FOUND))
ON_DEVICE(nvmlDeviceGetIndex, "index", (Device device, unsigned *out),
    *out = call.slice < 0 ? call.gpu : call.slice)  // of a slice: its index in its GPU
ON_DEVICE(nvmlDeviceGetMigMode, "mig", (Device device, unsigned *current, unsigned *pending),
    *current = get("mig");
    *pending = number(or(text("mig_pending"), text("mig"))))
ON_DEVICE(nvmlDeviceGetMaxMigDeviceCount, "mig_max", (Device device, unsigned *out),
    *out = get_or_0("mig") ? 7 : 0)  // without MIG it is 0, and no error
ON_DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, "mig_handle", (Device device, unsigned index, Device *out),
    if (call.slice >= 0 || index >= MAX_SLICES) return fail(INVALID_ARGUMENT);
    bool enabled = get("mig");
    enter(call.gpu, index);
    if (!enabled || !text("memory_mib")) return fail(NOT_FOUND);
    on_device("handle", *out = device + 1 + index))
ON_DEVICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, "mig_parent", (Device device, Device *out),
    if (call.slice < 0) return fail(INVALID_ARGUMENT);
    *out = board[call.gpu])
ON_DEVICE(nvmlDeviceGetGpuInstanceId, "gpu_instance", (Device device, unsigned *out),
    if (call.slice < 0) return fail(INVALID_ARGUMENT);
    *out = text("gpu_instance") ? get("gpu_instance") : call.slice + 1)
ON_DEVICE(nvmlDeviceGetComputeInstanceId, "compute_instance", (Device device, unsigned *out),
    *out = call.slice < 0 ? fail(INVALID_ARGUMENT) : get_or_0("compute_instance"))

// ---- Errors of memory, links and fabric ----

ON_DEVICE(nvmlDeviceGetTotalEccErrors, "ecc", (Device device, unsigned type, unsigned counter, u64 *out),
    static const char *const types[] = {"corrected", "uncorrected", NULL};
    static const char *const counters[] = {"volatile", "aggregate", NULL};
    *out = get("ecc.%s.%s", pick(counters, counter), pick(types, type)))
ON_DEVICE(nvmlDeviceGetEccMode, "ecc_mode", (Device device, unsigned *current, unsigned *pending),
    *current = get("ecc.mode");
    *pending = number(or(text("ecc.mode_pending"), text("ecc.mode"))))
NUMBER(nvmlDeviceGetDefaultEccMode, unsigned, "ecc.default")
ON_DEVICE(nvmlDeviceGetSramEccErrorStatus, "sram", (Device device, Sram *out),
    if (check_version(out->version, 1, sizeof *out)) return call.error;
    *out = (Sram){.version = out->version, .exceeded = get("sram.threshold_exceeded")})
ON_DEVICE(nvmlDeviceGetRemappedRows, "remapped_rows",
    (Device device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed),
    *corrected = get("remapped_rows.corrected");
    *uncorrected = get("remapped_rows.uncorrected");
    *pending = get("remapped_rows.pending");
    *failed = get("remapped_rows.failed"))
ON_DEVICE(nvmlDeviceGetRetiredPages, "retired_pages", (Device device, unsigned cause, unsigned *count, u64 *addresses),
    static const char *const causes[] = {"single_bit", "double_bit", NULL};
    unsigned room = addresses ? *count : 0, pages = get("retired_pages.%s", pick(causes, cause));
    for (unsigned i = 0; i < pages && i < room; i++) addresses[i] = 0x10000ULL * (i + 1);
    *count = pages;
    fail(pages > room ? INSUFFICIENT_SIZE : 0))

static long long nvlink(unsigned link, const char *key) {
    if (link >= get("nvlinks")) fail(INVALID_ARGUMENT);  // what drivers answer past the last link
    return number(or(text("nvlink%u.%s", link, key), text("nvlink.%s", key)));
}
ON_DEVICE(nvmlDeviceGetNvLinkState, "nvlink.state", (Device device, unsigned link, unsigned *out),
    *out = nvlink(link, "state"))
ON_DEVICE(nvmlDeviceGetNvLinkRemoteDeviceType, "nvlink.remote", (Device device, unsigned link, unsigned *out),
    *out = nvlink(link, "state") ? nvlink(link, "remote") : 0xFF)  // of a dead link it is unknown
ON_DEVICE(nvmlDeviceGetNvLinkErrorCounter, "nvlink.errors", (Device device, unsigned link, unsigned counter, u64 *out),
    static const char *const counters[] = {"replay", "recovery", "crc_flit", "crc_data", "ecc_data", NULL};
    *out = nvlink(link, pick(counters, counter)))
ON_DEVICE(nvmlDeviceGetGpuFabricInfoV, "fabric", (Device device, Fabric *out),
    unsigned version = out->version >> 24 == 3 ? 3 : 2;  // the third only adds the summary
    size_t size = version == 3 ? sizeof *out : offsetof(Fabric, summary);
    if (check_version(out->version, version, size)) return call.error;
    Fabric fabric = {.version = out->version, .state = get("fabric.state"), .status = get_or_0("fabric.status"),
                     .clique = get_or_0("fabric.clique"), .mask = get_or_0("fabric.mask"),
                     .summary = get_or_0("fabric.summary")};
    memcpy(out, &fabric, size))

// ---- Events: "xid=31,79" is the history of a GPU, oldest first; what is added to it is an event ----

static unsigned xids(unsigned n, u64 *xid) {  // how many there are; stores entry n
    unsigned length = 0;
    for (const char *item = text("xid"); item; item = strchr(item, ',') ? strchr(item, ',') + 1 : NULL)
        if (length++ == n) *xid = strtoull(item, NULL, 0);
    return length;
}
ON_MACHINE(nvmlEventSetCreate, "event_set", (EventSet **out), *out = call.error ? NULL : calloc(1, sizeof **out))
ON_MACHINE(nvmlEventSetFree, "event_free", (EventSet *set), if (!call.error) free(set))
ON_DEVICE(nvmlDeviceRegisterEvents, "event_register", (Device device, u64 types, EventSet *set),
    if (types & ~(u64)get("event_types")) fail(NOT_SUPPORTED);
    if (call.error) return call.error;
    set->types[call.gpu] |= types;
    set->seen[call.gpu] = xids(0, &(u64){0}))  // what happened before is not news

int nvmlEventSetWait_v2(EventSet *set, Event *out, unsigned timeout_ms) {
    for (unsigned waited = 0; !on_machine("event_wait"); waited += POLL_MS, sleep_ms(POLL_MS)) {
        for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
            if (!(set->types[gpu] & XID_EVENT)) continue;
            if (on_device("event_wait", board[gpu])) return call.error;
            u64 xid = 0;
            unsigned length = xids(set->seen[gpu], &xid);
            if (length > set->seen[gpu]) {
                *out = (Event){board[gpu], XID_EVENT, xid, NO_INSTANCE, NO_INSTANCE};
                return set->seen[gpu]++, call.error;
            }
            set->seen[gpu] = length;
        }
        if (waited >= timeout_ms) return TIMEOUT;
    }
    return call.error;
}
