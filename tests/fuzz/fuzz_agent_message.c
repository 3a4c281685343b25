/* Messages that the client library reads from its agent, and the names of functions in a grant. */
#define rfaas_api_take_event fuzz_take_event
#include "../../client/c/agent.c"
#include "../../client/c/agent_ticket.c"
#include "../../client/c/acquire.c"

#include "fuzz.h"

static size_t fed, event_bytes;

void rfaas_api_take_event(const rfaas_agent_event *e, const char *details) {
    MUST(memchr(e->text, 0, sizeof e->text));
    for (uint32_t i = 0; i < e->details_size; i++)
        event_bytes += details[i] != 0; /* every byte can be read */
}

void rfaas_agent_reach_forked(void) {}
int rfaas_agent_reach(int64_t until, int *status, char text[RFAAS_AGENT_TEXT]) { return (void)until, *status = RFAAS_PEER_GONE, text[0] = 0, -1; }

static void messages(const uint8_t *data, size_t size) {
    enum { TICKETS = 3 };
    last = 0; /* so that the corpus names these tickets */
    for (rfaas_ticket id = 1; id <= TICKETS; id++)
        MUST(rfaas_ticket_new(0) == id);
    buffer = malloc(size ? size : 1);
    MUST(buffer);
    memcpy(buffer, data, size);
    buffered = buffer_size = fed = size;
    if (take_messages())
        MUST(buffered <= fed && (buffered < sizeof(rfaas_agent_header) || ((rfaas_agent_header *)(void *)buffer)->size > buffered));
    for (rfaas_ticket id = 1; id <= TICKETS; id++) {
        rfaas_reply r;
        if (!rfaas_agent_take(id, &r))
            continue;
        MUST(r.size < fed && memchr(r.text, 0, sizeof r.text) && !r.lost);
        for (uint32_t i = 0; r.data && i < r.size; i++)
            event_bytes += r.data[i] != 0;
        rfaas_reply_free(&r);
    }
    rfaas_agent_end();
}

/* Twice: the names in a first grant, and in a grant to which the lease moves. */
static void names(input *from) {
    rfaas_lease l = {0};
    for (int i = 0; i < 2; i++) {
        rfaas_agent_candidate c = {.functions = take16(from)};
        c.names_size = take16(from) % (uint32_t)(from->left + 1);
        char *block = malloc(c.names_size ? c.names_size : 1);
        MUST(block);
        take(from, block, c.names_size);
        if (!take_functions(&l, &c, block))
            MUST(l.n_functions == c.functions);
        free(block);
    }
    for (uint32_t i = 0; i < l.n_functions; i++) {
        MUST(l.functions[i]);
        free(l.functions[i]);
    }
    free(l.functions);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input from = {data, size};
    if (take8(&from) % 2)
        names(&from);
    else
        messages(from.at, from.left);
    return 0;
}
