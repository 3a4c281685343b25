/* Calls functions that are written in Fortran. First argument: the library of extras.f90. Second: that of the example polynomial.f90. */
#define CHECK_ARGUMENT polynomial
static const char *polynomial;
#include "check.h"

static void extras(rfaas_lease *l) {
    struct {
        int64_t capacity, cores, calls, bytes, sum;
    } out;
    size_t n;
    rfaas_function look = find(l, "look"), complain = find(l, "complain");
    for (int64_t i = 1; i <= 3; i++) {
        OK(rfaas_invoke(l, look, "squares", 7, &out, sizeof out, &n, NULL));
        CHECK(n == sizeof out && out.capacity == sizeof out && out.cores >= 1 && out.calls == i && out.bytes == 10 && out.sum == 285);
    }
    OK(rfaas_invoke(l, look, "cubes", 5, &out, sizeof out, &n, NULL));
    CHECK(out.calls == 4 && out.bytes == 0 && out.sum == 0);
    CHECK(rfaas_invoke(l, look, "cubes", 5, &out, 8, &n, NULL) == RFAAS_RESULT_TOO_LARGE && n == sizeof out);
    OK(rfaas_invoke(l, find(l, "unsigned"), NULL, 0, NULL, 0, NULL, NULL));
    FAILS(rfaas_invoke(l, complain, "100%s of it   ", 14, &out, sizeof out, &n, NULL), RFAAS_FUNCTION_FAILED, "100%s of it");
    CHECK(!strstr(rfaas_last_error(), "of it "));
    FAILS(rfaas_invoke(l, complain, "", 0, &out, sizeof out, &n, NULL), RFAAS_FUNCTION_FAILED, "complain");
    FAILS(rfaas_invoke(l, find(l, "refuse"), "", 0, &out, sizeof out, &n, NULL), RFAAS_FUNCTION_FAILED, "not today");
    CHECK(rfaas_function_code() == -17);
    char large[600];
    memset(large, 'x', sizeof large);
    FAILS(rfaas_invoke(l, complain, large, sizeof large, &out, sizeof out, &n, NULL), RFAAS_FUNCTION_FAILED, "xxxxx");
}

/* Squares that a setup function has made, in a worker that maps its seed. */
static void table_of_a_seed(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_seed_options so = RFAAS_SEED_OPTIONS_INIT;
    rfaas_session *own; /* without tables, which a setup function must not have */
    rfaas_lease *l;
    rfaas_seed *seed;
    int64_t out[5];
    size_t n;
    o.library = library;
    o.memory = 64 << 20;
    so.name = "squares";
    OK(rfaas_session_open(NULL, &own));
    OK(rfaas_lease_open(own, &o, &l));
    OK(rfaas_seed_create(l, "plant", NULL, 0, &so, &seed));
    OK(rfaas_lease_release(l));
    OK(rfaas_table_put_seed(own, "planted", rfaas_seed_name(seed)));
    OK(rfaas_lease_open(own, &o, &l));
    OK(rfaas_invoke(l, find(l, "look"), "planted", 7, out, sizeof out, &n, NULL));
    CHECK(n == sizeof out && out[3] == 10 && out[4] == 285);
    OK(rfaas_lease_release(l));
    OK(rfaas_seed_release(seed));
    OK(rfaas_session_close(own));
}

static void example(void) {
    rfaas_lease_options o = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *l;
    double coefficients[] = {2, 0, -1}, x[] = {0, 1, 3}, y[3];
    size_t n;
    o.library = polynomial;
    OK(rfaas_lease_open(session, &o, &l));
    rfaas_function begin = find(l, "polynomial_begin"), at = find(l, "polynomial_at");
    FAILS(rfaas_invoke(l, at, x, sizeof x, y, sizeof y, &n, NULL), RFAAS_FUNCTION_FAILED, "call polynomial_begin first");
    FAILS(rfaas_invoke(l, begin, x, 12, NULL, 0, NULL, NULL), RFAAS_FUNCTION_FAILED, "input of 12 bytes");
    OK(rfaas_invoke(l, begin, coefficients, sizeof coefficients, NULL, 0, NULL, NULL));
    OK(rfaas_invoke(l, at, x, sizeof x, y, sizeof y, &n, NULL));
    CHECK(n == sizeof y && y[0] == -1 && y[1] == 1 && y[2] == 17);
    CHECK(rfaas_invoke(l, at, x, sizeof x, y, 8, &n, NULL) == RFAAS_RESULT_TOO_LARGE && n == sizeof y);
    OK(rfaas_lease_release(l));
}

void everything(void) {
    static const char squares[] = {0, 1, 4, 9, 16, 25, 36, 49, 64, 81};
    rfaas_piece part = RFAAS_PIECE((char *)squares, sizeof squares);
    rfaas_lease *l;
    OK(rfaas_init(NULL));
    OK(rfaas_session_open(NULL, &session));
    OK(rfaas_table_put(session, "squares", &part, 1));
    extras(l = lease(1, 1, RFAAS_WAIT_ADAPTIVE));
    OK(rfaas_lease_release(l));
    table_of_a_seed();
    example();
    OK(rfaas_finalize());
}
