/* The files that travel with a lease's library (options.bundle). The agent reads them. */
#include <errno.h>
#include <fts.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client.h"

int rfaas_api_bundle_paths(const char *list, char out[RFAAS_AGENT_BUNDLE]) {
    char here[PATH_MAX] = "";
    size_t at = 0;
    *out = 0;
    for (const char *p = list ? list : ""; *p;) {
        size_t n = strcspn(p, ":");
        if (n) {
            if (*p != '/' && !*here && !getcwd(here, sizeof here))
                return rfaas_api_fail(RFAAS_INVALID, 0, "lease: bundle: the current directory has no path: %s", strerror(errno));
            int wrote = snprintf(out + at, RFAAS_AGENT_BUNDLE - at, "%s%s%s%.*s", at ? ":" : "", *p == '/' ? "" : here,
                                 *p == '/' ? "" : "/", (int)n, p);
            if (wrote < 0 || (size_t)wrote >= RFAAS_AGENT_BUNDLE - at)
                return rfaas_api_fail(RFAAS_INVALID, 0, "lease: bundle: the absolute paths up to \"%.*s\" have more than %d bytes together: put the files into one directory and name that",
                                      (int)(n < 256 ? n : 256), p, RFAAS_AGENT_BUNDLE - 1);
            at += (size_t)wrote;
        }
        p += n + (p[n] == ':');
    }
    return RFAAS_OK;
}

int64_t rfaas_api_bundle_ns(const char *list, int64_t patience_ns) {
    enum { MOST = 65536, LOOK = 256 }; /* the agent refuses more files before it reads one */
    char paths[RFAAS_AGENT_BUNDLE], *each[RFAAS_AGENT_BUNDLE / 2 + 1], *save = NULL;
    int64_t until = dp_now_ns() + patience_ns;
    size_t n = 0, entries = 0;
    uint64_t size = 0;
    bool bounded = true;
    strcpy(paths, list);
    for (char *p = strtok_r(paths, ":", &save); p; p = strtok_r(NULL, ":", &save))
        each[n++] = p;
    each[n] = NULL;
    FTS *f = fts_open(each, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR | FTS_XDEV, NULL);
    for (FTSENT *e; f && bounded && (e = fts_read(f)); entries++) {
        bounded = entries <= 2 * MOST && (entries % LOOK || dp_now_ns() < until); /* a directory counts twice */
        bounded = bounded && size <= 1ull << 40; /* more is refused, too */
        if (e->fts_info == FTS_F || e->fts_info == FTS_D)
            size += (uint64_t)e->fts_statp->st_size + 8192; /* what a file takes when it is packed */
    }
    if (f)
        fts_close(f);
    return bounded ? (int64_t)((double)size / RFAAS_AGENT_TABLE_RATE * 2e9) : 0; /* it is read once to hash it, and once to send it */
}

static __thread const char *running; /* paths of the lease whose function this thread runs, or NULL */

const char *rfaas_api_bundle_of(const char *list) {
    const char *before = running;
    running = list;
    return before;
}

const char *rfaas_api_bundle_here(const char *name) {
    static __thread char path[RFAAS_AGENT_BUNDLE];
    size_t n = name ? strlen(name) : 0;
    for (const char *p = running ? running : ""; *p && n;) {
        size_t len = strcspn(p, ":"), end = len;
        while (end && p[end - 1] == '/')
            end--;
        if (end > n && !memcmp(p + end - n, name, n) && p[end - n - 1] == '/') {
            snprintf(path, sizeof path, "%.*s", (int)end, p);
            return path;
        }
        p += len + (p[len] == ':');
    }
    return NULL;
}
