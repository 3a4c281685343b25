/* Loading libfabric: what is said when it is missing, and what it leaves in the process. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "ends.h"

T_CASE(ofi_missing, "load/no-libfabric", .providers = T_OFI) {
    dp_error err = {0};
    dp_dev *dev = NULL;
    CHECK_EQ(setenv("RFAAS_LIBFABRIC", "libfabric-that-is-not-there.so.1", 1), 0);
    CHECK_REFUSED(dp_dev_open("ofi", NULL, &dev, &err), DP_UNSUPPORTED, err);
    CHECKF(strstr(err.msg, "libfabric-that-is-not-there.so.1") && strstr(err.msg, "install libfabric1"), "message: %s", err.msg);
    CHECK_EQ(setenv("RFAAS_LIBFABRIC", "libpthread.so.0", 1), 0);
    CHECK_REFUSED(dp_dev_open("ofi", NULL, &dev, &err), DP_UNSUPPORTED, err);
    CHECKF(strstr(err.msg, "libpthread.so.0 is older"), "message: %s", err.msg);
    unsetenv("RFAAS_LIBFABRIC");
    CHECK_OK_ERR(dp_dev_open("ofi", NULL, &dev, &err), err);
    dp_dev_close(dev);
}

T_CASE(ofi_bad_options, "device/bad-ofi-options", .providers = T_OFI) {
    dp_error err = {0};
    dp_dev *dev = NULL;
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.ofi_provider = "sockets"}, &dev, &err), DP_INVALID, err);
    CHECKF(strstr(err.msg, "sockets") && strstr(err.msg, "cxi"), "message: %s", err.msg);
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.keepalive_ms = -1}, &dev, &err), DP_INVALID, err);
    CHECK_REFUSED(dp_dev_open("ofi", &(dp_dev_options){.device = "no-such-domain"}, &dev, &err), DP_NO_DEVICE, err);
    CHECKF(strstr(err.msg, "no-such-domain"), "message: %s", err.msg);
    dp_dev_options o = {.ofi_provider = "cxi"};
    if (dp_dev_open("ofi", &o, &dev, &err) == DP_OK) /* this machine has a Slingshot adapter */
        dp_dev_close(dev);
    else
        CHECKF(err.status == DP_NO_DEVICE && strstr(err.msg, "cxi"), "message: %s", err.msg);
}

/* All of libfabric's providers are initialised: psm and psm2 install handlers. The harness looks for threads. */
T_CASE(ofi_handlers, "load/signal-handlers-stay", .providers = T_OFI) {
    struct sigaction before[NSIG], after;
    dp_error err = {0};
    dp_dev *dev = NULL;
    unsetenv("FI_PROVIDER");
    for (int s = 1; s < NSIG; s++)
        sigaction(s, NULL, &before[s]);
    CHECK_OK_ERR(dp_dev_open("ofi", NULL, &dev, &err), err);
    for (int s = 1; s < NSIG; s++)
        if (!sigaction(s, NULL, &after))
            CHECKF(after.sa_sigaction == before[s].sa_sigaction, "another handler for signal %d", s);
    dp_dev_close(dev);
}
