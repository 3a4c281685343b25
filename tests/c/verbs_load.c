/* libibverbs and libcrypto are loaded only when they are needed. If one cannot be loaded, the error says why. */
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* Returns how many providers of libibverbs are installed beside it, and how many of them this process has mapped. */
static int providers(int *loaded) {
    Dl_info at;
    char path[PATH_MAX];
    CHECK(dladdr((void *)dpv_ibv.get_device_list, &at));
    snprintf(path, sizeof path, "%.*s/libibverbs", (int)(strrchr(at.dli_fname, '/') - at.dli_fname), at.dli_fname);
    DIR *d = opendir(path);
    int installed = 0;
    *loaded = 0;
    for (const struct dirent *e; d && (e = readdir(d));)
        if (strstr(e->d_name, "-rdmav")) {
            installed++;
            *loaded += mapped(e->d_name);
        }
    if (d)
        closedir(d);
    return installed;
}

/* A process that loads all providers spends most of the time of its first device on them. */
T_CASE(needed_provider, "load/needed-providers-only", .providers = T_VERBS) {
    dp_dev *dev;
    dp_error err = {0};
    CHECK_OK_ERR(dp_dev_open("verbs", NULL, &dev, &err), err);
    int loaded, installed = providers(&loaded);
    CHECKF(loaded >= 1 && (loaded < installed || installed < 4), "%d of %d providers are loaded", loaded, installed);
    dp_dev_close(dev);
}

/* If the environment names drivers, libibverbs decides what it loads. */
T_CASE(named_provider, "load/providers-of-the-environment", .providers = T_VERBS) {
    int loaded;
    dp_error err = {0};
    setenv("RDMAV_DRIVERS", "rxe", 1);
    CHECK_OK_ERR(dp_verbs_load(&err), err);
    providers(&loaded);
    CHECK_EQ(loaded, 0);
}

T_CASE(provider_names, "load/provider-names") {
    CHECK(dpv_provider_matches("rxe", "rxe0", ""));
    CHECK(dpv_provider_matches("mlx5", "ibp65s0f0", "mlx5_core"));
    CHECK(dpv_provider_matches("hns", "hns_0", "hns3"));
    CHECK(dpv_provider_matches("irdma", "rocep1s0", "ice"));
    CHECK(dpv_provider_matches("hfi1verbs", "hfi1_0", "hfi1"));
    CHECK(!dpv_provider_matches("mlx5", "rocep1s0", "ice"));
    CHECK(!dpv_provider_matches("mlx4", "mlx5_0", "mlx5_core"));
    CHECK(!dpv_provider_matches("", "rxe0", ""));
}

/* A library without a directory, a directory without providers, and devices that do not exist have no effect. */
T_CASE(no_providers, "load/no-providers") {
    char dir[] = "/tmp/rfaas-providers.XXXXXX", library[64], path[96];
    CHECK(mkdtemp(dir));
    snprintf(library, sizeof library, "%s/libibverbs.so.1", dir);
    dpv_load_providers("libibverbs.so.1", dir);
    dpv_load_providers(library, dir);
    snprintf(path, sizeof path, "%s/libibverbs", dir);
    CHECK(!mkdir(path, 0700));
    snprintf(path, sizeof path, "%s/libibverbs/librxe-rdmav34.so", dir);
    FILE *f = fopen(path, "we"); /* no library: it cannot be loaded */
    CHECK(f && !fclose(f));
    dpv_load_providers(library, "/nonexistent");
    snprintf(path, sizeof path, "%s/rxe0", dir);
    CHECK(!mkdir(path, 0700));
    dpv_load_providers(library, dir);
    CHECK(!mapped(dir));
    CHECK(!rmdir(path));
    snprintf(path, sizeof path, "%s/libibverbs/librxe-rdmav34.so", dir);
    CHECK(!unlink(path));
    snprintf(path, sizeof path, "%s/libibverbs", dir);
    CHECK(!rmdir(path));
    CHECK(!rmdir(dir));
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
