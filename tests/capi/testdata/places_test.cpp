// rfaas.hpp with a resource manager and two executors of two cores: places, leases at them, leases across them, what happens to
// executors. The argument is the path of build/functions/echo.so. Exit status 0: all good.
#include <cstdio>
#include <cstring>
#include <rfaas.hpp>
#include <set>
#include <string>
#include <thread>

static int failures;
static void report(int line, const char *what) {
    std::fprintf(stderr, "places_test.cpp:%d: %s (last error: %s)\n", line, what, rfaas_last_error());
    failures++;
}
#define CHECK(x) ((x) ? (void)0 : report(__LINE__, #x))

static void call(rfaas::lease &l) {
    int in[2] = {3, 4}, out[2] = {};
    CHECK(l.invoke(l.function("echo"), in, out) == 2 && out[1] == 4);
}

/* Again while the board does not show yet what was released. */
template <class F> static auto patiently(F f) {
    for (auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);;)
        try {
            return f();
        } catch (const rfaas::busy_error &) {
            if (std::chrono::steady_clock::now() > end)
                throw;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
}

int main(int, char **argv) {
    rfaas::library library;
    rfaas::session session;
    std::set<std::string> open;
    CHECK(session.watch(
        [&](const rfaas_change &c) {
            if (c.state == RFAAS_EXECUTOR_OPEN)
                open.insert(c.executor);
            return open.size() == 2;
        },
        std::chrono::seconds(20)));
    CHECK(!session.watch([](const rfaas_change &c) { return c.state == 99; }, std::chrono::milliseconds(20)));
    rfaas::session looks;
    CHECK(looks.changes(1).size() == 1 && looks.changes().size() >= 1); // it begins with those that are there
    try {
        rfaas::session fresh;
        fresh.watch([](const rfaas_change &) -> bool { throw std::runtime_error("enough"); }, std::chrono::seconds(20));
        report(__LINE__, "no exception came through");
    } catch (const std::runtime_error &e) {
        CHECK(std::string(e.what()) == "enough");
    }

    rfaas::lease_options two = rfaas::lease_options(argv[1]).with_workers(2);
    {
        std::vector<rfaas_place> where = patiently([&] { return rfaas::places(session, two, 2); });
        CHECK(where.size() == 2 && std::strcmp(where[0].executor, where[1].executor) != 0);
        for (const rfaas_place &place : where) {
            rfaas::lease l = patiently([&] { return rfaas::lease(session, two, place); });
            CHECK(std::string(l.info().executor) == place.executor);
            call(l);
        }
    }
    std::vector<rfaas::lease> all = patiently([&] { return rfaas::lease::across(session, rfaas::lease_options(argv[1]).with_workers(4)); });
    CHECK(all.size() == 2 && all[0].workers() + all[1].workers() == 4);
    for (rfaas::lease &l : all)
        call(l);
    try {
        rfaas::lease::across(session, rfaas::lease_options(argv[1]).with_workers(5), 9);
        report(__LINE__, "five workers on four cores");
    } catch (const rfaas::busy_error &) {
    }
    return failures != 0;
}
