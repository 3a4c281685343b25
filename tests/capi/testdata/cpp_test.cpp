// Test of rfaas.hpp. Needs what batch_test.c needs. Exit status 0: all good.
#include <poll.h>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <rfaas.hpp>

static int failures;
static void report(int line, const char *what) {
    std::fprintf(stderr, "cpp_test.cpp:%d: %s (last error: %s)\n", line, what, rfaas_last_error());
    failures++;
}
#define CHECK(x) ((x) ? (void)0 : report(__LINE__, #x))
#define THROWS(type, word, ...) \
    do { \
        try { \
            __VA_ARGS__; \
            report(__LINE__, "no exception: " #__VA_ARGS__); \
        } catch (const type &e) { \
            if (!std::strstr(e.what(), word)) \
                report(__LINE__, e.what()); \
        } \
    } while (0)

/* Every worker keeps what the init call brings. Without it the function fails with a code. */
static void init_calls(const rfaas::session &session) {
    const std::uint64_t number[1] = {4711};
    const std::string path = std::getenv("TEST_LIBRARY"), unknown = "keeps";
    std::uint64_t answer[1] = {};
    {
        rfaas::lease lease(session, rfaas::lease_options(path).with_workers(2).with_init("keep", number));
        for (int i = 0; i < 2; i++, answer[0] = 0)
            CHECK(lease.invoke(lease.function("what_was_kept"), number, answer, rfaas::call_options().on(i)) == 1 && answer[0] == 4711);
    }
    {
        rfaas::lease lease(session, rfaas::lease_options(path));
        try {
            lease.invoke(lease.function("what_was_kept"), number, answer);
            CHECK(!"an error");
        } catch (const rfaas::function_error &e) {
            CHECK(e.function_code() == -5 && std::strstr(e.what(), "nothing was kept"));
        }
    }
    THROWS(rfaas::invalid_error, "keeps", rfaas::lease(session, rfaas::lease_options(path).with_init(unknown)));
}

/* Handles of C become objects, and objects handles of C. */
static void adoption(const rfaas::session &session, const char *path) {
    rfaas_lease_options options = RFAAS_LEASE_OPTIONS_INIT;
    rfaas_lease *handle = nullptr;
    double in[2] = {1, 2}, out[2] = {};
    options.library = path;
    rfaas::check(rfaas_lease_open(session.get(), &options, &handle));
    {
        rfaas::lease lease = rfaas::lease::adopt(handle);
        CHECK(lease.get() == handle && lease.invoke(lease.function("echo"), in, out) == 2 && out[1] == 2);
        rfaas::request request = lease.iinvoke(lease.function("echo"), in, out);
        rfaas_request number = request.detach();
        CHECK(!request && rfaas_wait(&number, nullptr) == RFAAS_OK);
    } /* releases it */
    CHECK(rfaas_lease_workers(handle) == RFAAS_INVALID);
    rfaas::check(rfaas_lease_open(session.get(), &options, &handle));
    {
        rfaas::lease lease = rfaas::lease::adopt(handle);
        CHECK(lease.detach() == handle && !lease.get());
    } /* does not release it */
    CHECK(rfaas_lease_workers(handle) == 1 && rfaas_lease_release(handle) == RFAAS_OK);
    rfaas_session *opened = nullptr;
    rfaas::check(rfaas_session_open(nullptr, &opened));
    rfaas::session adopted = rfaas::session::adopt(opened);
    rfaas::lease last(adopted, rfaas::lease_options(path));
    CHECK(last.workers() == 1);
    last.release();
    CHECK(adopted.detach() == opened && !adopted.get() && rfaas_session_close(opened) == RFAAS_OK);
}

/* Futures of two workers with 8 slots each, which are fewer than there are calls. */
static void futures(rfaas::lease &lease) {
    const rfaas::function twice = lease.function("twice"), picky = lease.function("picky"), slow = lease.function("slow");
    std::vector<rfaas::future<std::uint64_t>> all;
    for (std::uint64_t i = 0; i < 100; i++) {
        std::vector<std::uint64_t> in(5, i); /* gone before the call starts */
        all.push_back(lease.async<std::uint64_t>(twice, in));
    }
    for (std::uint64_t i = 0; i < 100; i++)
        CHECK(all[i].get() == std::vector<std::uint64_t>(5, 2 * i) && all[i].ready());
    std::array<std::uint64_t, 1> bad = {700}, good = {4};
    rfaas::future<std::uint64_t> fails = lease.async<std::uint64_t>(picky, bad);
    THROWS(rfaas::function_error, "item 700", fails.get());
    THROWS(rfaas::function_error, "item 700", fails.get());
    fails = lease.async<std::uint64_t>(twice, good);
    while (!fails.ready()) {
    }
    CHECK(fails.get() == std::vector<std::uint64_t>{8});
    CHECK(lease.async<std::uint64_t>(lease.chain(twice, twice), good).get() == std::vector<std::uint64_t>{16});
    THROWS(rfaas::function_error, "picky, the second function of a chain", lease.async<std::uint64_t>(lease.chain(lease.function("same"), picky), bad).get());
    THROWS(rfaas::invalid_error, "function 999", lease.chain(twice, rfaas::function(999)));
    THROWS(rfaas::function_error, "capacity", lease.async<std::uint64_t>(twice, std::array<std::uint64_t, 2>(), 1).get());
    THROWS(rfaas::invalid_error, "function 999", lease.async<std::uint64_t>(rfaas::function(999), good));
    /* Other requests have all slots. */
    std::vector<rfaas::request> others;
    std::vector<std::array<std::uint64_t, 1>> results(16);
    for (auto &r : results)
        others.push_back(lease.iinvoke(slow, good, r));
    rfaas::future<std::uint64_t> later = lease.async<std::uint64_t>(twice, good);
    if (!later.ready())
        rfaas::wait_all(others);
    CHECK(later.get()[0] == 8);
    others.clear();
    lease.async<std::uint64_t>(slow, good); /* cancelled at once */
}

#if defined(__cpp_impl_coroutine)
static rfaas::task<std::uint64_t> four_times(rfaas::lease &lease, rfaas::function twice, std::uint64_t x) {
    std::array<std::uint64_t, 1> in = {x};
    in[0] = (co_await lease.async<std::uint64_t>(twice, in))[0];
    in[0] = (co_await lease.async<std::uint64_t>(twice, in))[0];
    co_return in[0];
}

static rfaas::task<> nothing() { co_return; }

static rfaas::task<std::uint64_t> both(rfaas::lease &lease, rfaas::function twice) {
    std::array<std::uint64_t, 1> one = {1}, two = {2};
    auto a = lease.async<std::uint64_t>(twice, one), b = lease.async<std::uint64_t>(twice, two); /* at the same time */
    co_await nothing();
    std::uint64_t sum = (co_await b)[0] + (co_await a)[0];
    co_return sum + co_await four_times(lease, twice, 10);
}

static rfaas::task<> counted(rfaas::lease &lease, rfaas::function f, std::uint64_t x, int &ended) {
    std::array<std::uint64_t, 1> in = {x};
    co_await lease.async<std::uint64_t>(f, in);
    ended++;
}

static void coroutines(rfaas::lease &lease) {
    const rfaas::function twice = lease.function("twice"), picky = lease.function("picky"), slow = lease.function("slow");
    CHECK(rfaas::run(both(lease, twice)) == 46);
    std::vector<rfaas::task<std::uint64_t>> many;
    for (std::uint64_t i = 0; i < 300; i++)
        many.push_back(four_times(lease, twice, i));
    std::vector<std::uint64_t> results = rfaas::run(rfaas::when_all(std::move(many)));
    for (std::uint64_t i = 0; i < 300; i++)
        CHECK(results[i] == 4 * i);
    CHECK(rfaas::run(rfaas::when_all(std::vector<rfaas::task<std::uint64_t>>())).empty());
    /* One that fails does not stop the others, which wait for calls when it does. */
    int ended = 0;
    std::vector<rfaas::task<>> some;
    for (std::uint64_t i = 0; i < 20; i++)
        some.push_back(counted(lease, i == 7 ? picky : slow, i == 7 ? 700 : i, ended));
    THROWS(rfaas::function_error, "item 700", rfaas::run(rfaas::when_all(std::move(some))));
    CHECK(ended == 19);
    /* Other requests of the program have all slots. */
    std::array<std::uint64_t, 1> in = {1}, out[16];
    std::vector<rfaas::request> others;
    const rfaas::function never = lease.function("never");
    for (auto &o : out)
        others.push_back(lease.iinvoke(never, in, o));
    THROWS(rfaas::busy_error, "every worker has", rfaas::run(four_times(lease, twice, 1)));
    { rfaas::task<std::uint64_t> never_begun = four_times(lease, twice, 1); }
    lease.release();
}
#endif

int main(int, char **argv) {
    THROWS(rfaas::invalid_error, "not initialised", rfaas::session());
    rfaas::library library;
    CHECK(rfaas::version() == RFAAS_VERSION_MAJOR * 1000 + RFAAS_VERSION_MINOR);
    rfaas::session session;
    THROWS(rfaas::unsupported_error, "resource manager", session.changes());
    { // tables, of which the leases below get the first one
        const std::vector<double> energies(1000, 0.5);
        const std::array<float, 3> levels{1, 2, 3};
        session.put_table("energies", {energies, levels});
        session.put_table("levels", {levels}, 0x300000000000);
        THROWS(rfaas::invalid_error, "has a table \"levels\" already", session.put_table("levels", {energies}));
        THROWS(rfaas::invalid_error, "address 0x3 is not a multiple of the page size", session.put_table("odd", {energies}, 3));
        session.drop_table("levels");
        THROWS(rfaas::invalid_error, "no table \"levels\"", session.drop_table("levels"));
    }
    { // a seed, whose setup function counts its call
        rfaas::session own;
        rfaas::lease_options small(argv[1]);
        small.memory = 64 << 20;
        rfaas::lease maker(own, small);
        THROWS(rfaas::invalid_error, "ecko", maker.create_seed("ecko", "counter"));
        rfaas::seed made = maker.create_seed("count", std::string("payload"), "counter", std::chrono::minutes(1)), opened = own.open_seed(made.name());
        CHECK(opened.info().version == made.info().version && std::string(made.info().setup) == "count");
        rfaas::lease child(own, rfaas::lease_options(argv[1]).with_seed(opened.name()).with(rfaas::lease_flags::seed_required));
        std::vector<std::uint64_t> calls(1);
        child.invoke(child.function("count"), std::string(), calls);
        CHECK(calls[0] == 2 && child.origin(0).start == RFAAS_START_SEEDED);
        const std::string name = made.name();
        THROWS(rfaas::invalid_error, "count must call rfaas_set_root", own.put_table_seed("counter", name));
        opened.release();
        made.release();
        THROWS(rfaas::lease_error, "no seed counter", own.put_table_seed("counter", name));
        THROWS(rfaas::lease_error, "no seed counter", own.open_seed("counter:1@" + std::string(maker.info().executor_address)));
    }
    rfaas::session_options nowhere;
    nowhere.executor = "127.0.0.1:1";
    THROWS(rfaas::connection_error, "127.0.0.1:1", rfaas::session s(nowhere));
    {
        nowhere.with(rfaas::session_flags::local);
        rfaas::session s(nowhere);
        THROWS(rfaas::connection_error, "127.0.0.1:1", rfaas::lease(s, rfaas::lease_options(argv[1])));
        rfaas::lease alone(s, rfaas::lease_options(argv[1]).with_local());
        CHECK(std::string(alone.info().local_reason).find("127.0.0.1:1") != std::string::npos && alone.event().kind == RFAAS_EVENT_LOCAL);
    }
    THROWS(rfaas::invalid_error, "nothing.so", rfaas::lease(session, rfaas::lease_options("/nothing.so")));
    THROWS(rfaas::invalid_error, "/none/second: no such file",
           rfaas::lease(session, rfaas::lease_options(argv[1]).with_bundle(argv[1]).with_bundle("/none/second")));
    {
        rfaas::lease lease(session, rfaas::lease_options(argv[1]).with_workers(2).with_workers_min(1).with_depth(4).with_reuse());
        CHECK(lease.workers() == 2 && lease.info().depth == 4);
        rfaas::function echo = lease.function("echo"), fail = lease.function("fail"), crash = lease.function("crash");
        THROWS(rfaas::invalid_error, "ecko", lease.function("ecko"));
        std::vector<double> in(50), out(60);
        std::iota(in.begin(), in.end(), 1.0);
        CHECK(lease.invoke(echo, in, out) == 50 && std::equal(in.begin(), in.end(), out.begin()));
        int array[3] = {1, 2, 3};
        std::array<int, 3> back{};
        CHECK(lease.invoke(echo, array, back, rfaas::call_options().on(1).within(std::chrono::seconds(5))) == 3 && back[2] == 3);
        const std::vector<double> constant = in;
        CHECK(lease.invoke(echo, constant, rfaas::span<double>(out.data(), 50)) == 50);
        CHECK(lease.invoke(echo, std::vector<double>(), out) == 0);
        { // payloads and results in pieces
            double m[6][4] = {}, back[6][4] = {};
            std::vector<double> edge{1, 2, 3};
            const std::array<float, 2> tail{4.5f, 5.5f};
            std::array<float, 2> end{};
            for (int i = 0; i < 6; i++)
                m[i][1] = i + 1;
            CHECK(lease.invokev(echo, {edge, rfaas::strided(&m[0][1], 6, 4), tail},
                                {rfaas::strided(&back[5][3], 6, -4), rfaas::span<double>(&back[0][0], 3), end}) == 9 * 8 + 8);
            CHECK(back[5][3] == 1 && back[3][3] == 3 && back[2][3] == 1 && back[0][3] == 3 && back[0][0] == 4 && back[0][2] == 6);
            CHECK(end[0] == 4.5f && end[1] == 5.5f && back[1][0] == 0);
            std::vector<rfaas::const_piece> from{edge, rfaas::strided(static_cast<const double *>(m[0]), 3, 8, 4)};
            std::vector<double> all(15);
            rfaas::request r = lease.iinvokev(echo, from, {all});
            from.clear();
            CHECK(r.wait<double>() == 15 && all[2] == 3 && all[4] == 1 && all[8] == 3 && all[12] == 5);
            CHECK(lease.invokev(echo, {}, {}) == 0);
            THROWS(rfaas::invalid_error, "stride of in[0] is 8, less than its element size 16",
                   lease.invokev(echo, {rfaas::strided(&m[0][0], 2, 1, 2)}, {all}));
        }
        THROWS(rfaas::function_error, "no good", lease.invoke(fail, std::string("no good"), out));
        try {
            lease.invoke(crash, in, out);
            report(__LINE__, "crash");
        } catch (const rfaas::error &e) {
            CHECK(e.status() == RFAAS_WORKER_DIED && e.may_have_run());
            CHECK(e.code() == rfaas::status::worker_died && e.kind() == rfaas::error_class::connection);
            CHECK(std::strcmp(rfaas::strerror(e.code()), rfaas_strerror(RFAAS_WORKER_DIED)) == 0);
        }
        THROWS(rfaas::invalid_error, "worker 9", lease.invoke(echo, in, out, rfaas::call_options().on(9)));

        auto before = lease.statistics().repeated;
        THROWS(rfaas::connection_error, "crash", lease.invoke(crash, in, out, rfaas::call_options().repeat(1)));
        CHECK(lease.statistics().repeated == before + 1);
        std::uint64_t long_ns[1] = {500000000u};
        THROWS(rfaas::function_error, "deadline", lease.invoke(lease.function("sleep_ns"), long_ns, back,
               rfaas::call_options().repeat(1).each_within(std::chrono::milliseconds(20))));
        CHECK(lease.statistics().repeated == before + 2);

        std::vector<rfaas::request> requests;
        std::vector<std::vector<double>> results(4, std::vector<double>(50));
        for (auto &r : results)
            requests.push_back(lease.iinvoke(echo, in, r));
        std::size_t bytes = 0;
        std::size_t first = rfaas::wait_any(requests, &bytes);
        CHECK(first < 4 && bytes == 400 && !requests[first] && results[first] == in);
        rfaas::wait_all(requests);
        rfaas::request pair[2] = {lease.iinvoke(fail, in, results[0]), lease.iinvoke(echo, in, results[1])};
        std::vector<rfaas::outcome> each = rfaas::wait_each(pair);
        CHECK(each.size() == 2 && each[0].status == RFAAS_FUNCTION_FAILED && each[1].status == RFAAS_OK && each[1].bytes == 400);
        results[0] = in;
        for (auto &r : results)
            CHECK(r == in);
        CHECK(rfaas::wait_any(requests) == RFAAS_UNDEFINED);
        CHECK(rfaas::wait_any_for(requests, std::chrono::seconds(30)) == RFAAS_UNDEFINED);
        CHECK(rfaas::call_worker() >= 0);
        std::vector<decltype(in)::value_type> few(1);
        bool too_large = false;
        try {
            lease.invoke(echo, in, few, rfaas::call_options().keeping(1 << 20));
        } catch (const rfaas::error &e) {
            too_large = e.status() == RFAAS_RESULT_TOO_LARGE;
        }
        CHECK(too_large && rfaas::kept_result<decltype(in)::value_type>() == in);
        pollfd descriptor{};
        descriptor.fd = lease.descriptor();
        descriptor.events = POLLIN;
        lease.arm(); // no request is in flight
        CHECK(poll(&descriptor, 1, 30000) == 1);
        CHECK(std::string(lease.function_name(echo)) == "echo" && lease.status() == RFAAS_OK);
        rfaas::request r = lease.iinvoke(echo, in, results[0]);
        std::size_t n = 0;
        while (!r.test<double>(&n)) {
        }
        CHECK(n == 50 && !r && r.wait() == 0);
        std::uint64_t while_ns[1] = {500000000u}, slept[1];
        rfaas::request slow = lease.iinvoke(lease.function("sleep_ns"), while_ns, slept), quick = lease.iinvoke(echo, in, results[0]);
        auto given_up = lease.statistics().abandoned;
        slow = std::move(quick); // what it was is cancelled at once
        CHECK(!quick && lease.statistics().abandoned == given_up + 1 && slow.wait<double>() == 50);
        rfaas::request *self = &slow;
        *self = std::move(slow);
        CHECK(!slow);
        rfaas::request ended = lease.iinvoke(echo, in, results[0]);
        ended.cancel();
        CHECK(!ended && ended.wait() == 0);
        { rfaas::request dropped = lease.iinvoke(echo, in, results[0]); } // cancelled
        for (int w = 0; w < 2; w++)
            lease.invoke(echo, in, out, rfaas::call_options().on(w)); // answered after the calls that were cancelled
        rfaas::request moved = std::move(r = lease.iinvoke(echo, in, results[0]));
        CHECK(!r && moved.wait<double>() == 50);

        rfaas::buffer<double> big(lease, 100000);
        std::vector<double> copy(100000);
        std::fill(big.begin(), big.end(), 2.5);
        CHECK(lease.invoke(echo, big, copy) == 100000 && copy[99999] == 2.5);
        rfaas::buffer<double> in_place(lease, 100000);
        CHECK(lease.invoke(echo, big, in_place, rfaas::call_options().in_place()) == 100000 && in_place[99999] == 2.5);
        THROWS(rfaas::invalid_error, "overlap", lease.invoke(echo, big, big, rfaas::call_options().with(rfaas::call_flags::in_place)));
        rfaas::registration here(lease, copy);
        CHECK(lease.invoke(echo, copy, big) == 100000 && big[5] == 2.5);
        CHECK(lease.statistics().replaced >= 1 && lease.statistics().calls >= 10);
        rfaas_event event = lease.event(); // of the crash
        CHECK(event.kind == rfaas::event_kind::worker_died && event.text[0]);
        while (lease.event().kind != rfaas::event_kind::none) {
        }
        lease.invoke(lease.function("print"), std::string("hear, hear"), copy, rfaas::call_options().on(1));
        rfaas_worker_details worker = lease.worker_info(1);
        CHECK(worker.pid > 1 && worker.calls > 0);
        CHECK(lease.origin(1).pid == worker.pid && session.cached() == 0);
        THROWS(rfaas::invalid_error, "worker 2", lease.worker_info(2));
        THROWS(rfaas::invalid_error, "worker 2", lease.replace_worker(2));
        lease.replace_worker(1);
        CHECK(lease.origin(1).pid != 0 && lease.origin(1).pid != worker.pid);
        lease.renew(std::chrono::minutes(1));
        THROWS(rfaas::invalid_error, "negative", lease.renew(std::chrono::nanoseconds(-1)));
        rfaas::lease other = std::move(lease);
        CHECK(!lease.get() && other.workers() == 2);
        rfaas::lease none = std::move(other); // released by the next one that takes its place
        rfaas_lease *old = none.get();
        none = rfaas::lease(session, rfaas::lease_options(std::getenv("TEST_LIBRARY")).with_local());
        CHECK(rfaas_lease_workers(old) == RFAAS_INVALID && none.workers() == 1);
        other = std::move(none);
        other.release();
        rfaas::lease again(session, rfaas::lease_options(argv[1]).with_workers(2).with_depth(4).with_reuse().with_renewal().lasting(std::chrono::minutes(1)));
        CHECK(again.statistics().cached == 2 && again.statistics().queue_pairs == 0);
    }
    adoption(session, argv[1]);
    init_calls(session);
    rfaas::lease_options two(std::getenv("TEST_LIBRARY"));
    rfaas::lease lease(session, two.with_workers(2).with_wait_mode(rfaas::wait_mode::warm));
    std::vector<std::uint64_t> in(10001), out(10001);
    std::iota(in.begin(), in.end(), std::uint64_t(0));
    lease.map(lease.function("twice"), in, out);
    bool right = true;
    for (std::size_t i = 0; i < in.size(); i++)
        right = right && out[i] == 2 * in[i];
    CHECK(right);
    lease.map(lease.function("twice"), in, out, rfaas::map_options().by(100).within(std::chrono::seconds(30)).repeat(1));
    rfaas::lease here(session, rfaas::lease_options(std::getenv("TEST_LIBRARY")).with_local()); // no core is left
    CHECK(std::string(here.info().provider) == "local");
    here.map(here.function("twice"), in, out);
    CHECK(out[10000] == 20000 && here.statistics().local > 0);
    rfaas::session other_session;
    other_session.close();
    THROWS(rfaas::invalid_error, "NULL", other_session.close());
    std::int64_t total = 7;
    lease.reduce(lease.function("twice"), in, rfaas::span<std::int64_t>(&total, 1), rfaas::operation::sum);
    CHECK(total == 7 + 10000 * std::int64_t(10001));
    std::vector<double> largest(2, -1.0);
    lease.reduce(lease.function("fractions"), in, largest, rfaas::operation::max, rfaas::map_options().by(100));
    CHECK(largest[0] == 1.0 / 3 && largest[1] == 10000);
    std::vector<std::uint64_t> collected;
    lease.reduce<std::uint64_t>(lease.function("twice"), in, collected, [](auto &to, const std::uint64_t &result) { to.push_back(result); });
    CHECK(collected == out);
    THROWS(std::runtime_error, "enough", lease.reduce<std::uint64_t>(lease.function("twice"), in, total, [](std::int64_t &, const std::uint64_t &r) {
        if (r == 20)
            throw std::runtime_error("enough");
    }));
    THROWS(rfaas::invalid_error, "operation is 9", lease.reduce(lease.function("twice"), in, largest, rfaas::operation(9)));
    futures(lease);
    out.pop_back();
    THROWS(rfaas::invalid_error, "10001 elements in, room for 10000", lease.map(lease.function("twice"), in, out));
#if defined(__cpp_impl_coroutine)
    coroutines(lease);
#endif
    return failures != 0;
}
