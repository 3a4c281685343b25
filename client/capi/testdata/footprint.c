/* What the library adds to a process: arguments librfaas.so, echo.so. It is opened only after the first look. Prints lines of
 * "name value". */
#include <dlfcn.h>
#include <rfaas.h>
#include <stdio.h>
#include <string.h>

static long status_of(const char *field) {
    char line[256];
    long value = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, field, strlen(field)))
            sscanf(line + strlen(field), "%ld", &value);
    if (f)
        fclose(f);
    return value;
}

static void say(const char *when, long rss, long threads) {
    printf("%s_KiB %ld\n%s_threads %ld\n", when, status_of("VmRSS:") - rss, when, status_of("Threads:") - threads);
}

int main(int argc, char **argv) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_session *s;
    rfaas_lease *l;
    rfaas_function f;
    long rss = status_of("VmRSS:"), threads = status_of("Threads:");
    void *h = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!h)
        return fprintf(stderr, "%s\n", dlerror()), 1;
#define GET(name) __typeof__(&name) p_##name = (__typeof__(&name))dlsym(h, #name)
    GET(rfaas_init);
    GET(rfaas_session_open);
    GET(rfaas_lease_open);
    GET(rfaas_lease_function);
    GET(rfaas_invoke);
    GET(rfaas_finalize);
    GET(rfaas_last_error);
    o.library = argv[2];
    int status = p_rfaas_init(NULL);
    say("after_init", rss, threads);
    if (!status)
        status = p_rfaas_session_open(NULL, &s);
    if (!status)
        status = p_rfaas_lease_open(s, &o, &l);
    if (!status)
        status = p_rfaas_lease_function(l, "empty", &f);
    for (int i = 0; i < 10000 && !status; i++)
        status = p_rfaas_invoke(l, f, NULL, 0, NULL, 0, NULL, NULL);
    if (status)
        return fprintf(stderr, "%s\n", p_rfaas_last_error()), 1;
    say("after_calls", rss, threads);
    return p_rfaas_finalize();
}
