/* libibverbs and libcrypto are loaded only when they are needed. If one cannot be loaded, the error says why. */
#include <dlfcn.h>
#include <stdlib.h>

#include "dp_tcp_crypto.h"
#include "dp_verbs.h"
#include "ends.h"

/* Whether a file of that name is mapped. */
static bool mapped(const char *name) {
    FILE *f = fopen("/proc/self/maps", "re");
    CHECK(f);
    char line[512];
    bool found = false;
    while (fgets(line, sizeof line, f))
        found |= strstr(line, name) != NULL;
    fclose(f);
    return found;
}

T_CASE(not_loaded, "load/shm-loads-nothing", .providers = T_SHM) {
    dp_dev *dev;
    dp_error err = {0};
    CHECK_OK_ERR(dp_dev_open("shm", NULL, &dev, &err), err);
    CHECK(mapped("libc.so"));
    CHECK(!mapped("libibverbs"));
    CHECK(!mapped("libnl-"));
    CHECK(!mapped("libcrypto"));
    dp_dev_close(dev);
}

/* With the default setting, a connection on loopback is not encrypted. */
T_CASE(crypto_not_loaded, "load/tcp-on-loopback-loads-nothing", .providers = T_TCP) {
    const dp_dev_options o = {.encrypt = DP_ENCRYPT_ON};
    dp_dev *dev[2];
    end e[2];
    dp_error err = {0};
    for (int i = 0; i < 2; i++) {
        CHECK_OK_ERR(dp_dev_open("tcp", &o, &dev[i], &err), err);
        end_open(&e[i], NULL, dev[i]);
    }
    ends_connect_and_write(&e[0], &e[1]);
    CHECK(!mapped("libcrypto"));
    CHECK_OK(dp_crypto_load(&err));
    CHECK(mapped("libcrypto"));
    CHECK(!dlsym(RTLD_DEFAULT, "EVP_CIPHER_fetch"));
    for (int i = 0; i < 2; i++) {
        end_close(&e[i]);
        dp_dev_close(dev[i]);
    }
}

T_CASE(loaded_once, "load/once", .providers = T_VERBS) {
    CHECK(!mapped("libibverbs"));
    dp_error err = {0};
    CHECK_OK_ERR(dp_verbs_load(&err), err);
    CHECK(mapped("libibverbs"));
    dpv_ibv_functions first = dpv_ibv;
    CHECK_OK_ERR(dp_verbs_load(&err), err);
    CHECK(!memcmp(&first, &dpv_ibv, sizeof first));
    /* The versions that a linked program would call. */
    void *lib = dlopen(DPV_IBV_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    CHECK(lib);
#define CHECK_DEFAULT(member, function, version) CHECK(dlsym(lib, #function) == (void *)dpv_ibv.member);
    DPV_IBV_FUNCTIONS(CHECK_DEFAULT)
    dlclose(lib);
    /* Its names stay its own. */
    CHECK(!dlsym(RTLD_DEFAULT, "ibv_open_device"));
}

T_CASE(missing, "load/missing-library") {
    dpv_ibv_functions f = {0}, before = f;
    dp_error err = {0};
    CHECK_REFUSED(dpv_ibv_load_from("librfaas-no-such-verbs.so.1", &f, &err), DP_UNSUPPORTED, err);
    CHECKF(strstr(err.msg, "librfaas-no-such-verbs.so.1") && strstr(err.msg, "No such file") && strstr(err.msg, "install libibverbs1 "
           "and ibverbs-providers"), "%s", err.msg);
    CHECKF(strlen(err.msg) < sizeof err.msg - 1, "cut off: %s", err.msg);
    CHECK(!memcmp(&f, &before, sizeof f));
    CHECK_STATUS(dpv_ibv_load_from("librfaas-no-such-verbs.so.1", &f, NULL), DP_UNSUPPORTED);
}

/* Another library simulates a libibverbs that is too old. */
T_CASE(too_old, "load/missing-function") {
    dpv_ibv_functions f = {0}, before = f;
    dp_error err = {0};
    CHECK_REFUSED(dpv_ibv_load_from("libc.so.6", &f, &err), DP_UNSUPPORTED, err);
    CHECKF(strstr(err.msg, "libc.so.6") && strstr(err.msg, "ibv_get_device_list of IBVERBS_1.1") && strstr(err.msg, "upgrade"),
           "%s", err.msg);
    CHECKF(strlen(err.msg) < sizeof err.msg - 1, "cut off: %s", err.msg);
    CHECK(!memcmp(&f, &before, sizeof f));
}

static void *load(void *arg) {
    dp_error err = {0};
    *(int *)arg = dp_verbs_load(&err);
    return NULL;
}

/* If the library is missing, every thread gets the error. */
T_CASE(many_threads, "load/threads") {
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    int status[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, load, &status[i]));
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    for (int i = 1; i < THREADS; i++)
        CHECK_EQ(status[i], status[0]);
    CHECK(status[0] == (dpv_ibv.open_device ? DP_OK : DP_UNSUPPORTED));
}
