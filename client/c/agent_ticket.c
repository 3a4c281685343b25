#include "agent_ticket.h"

#include <stdio.h>
#include <stdlib.h>

#include "rfaas.h"

static rfaas_ticket_entry *tickets;
static rfaas_ticket last;

rfaas_ticket rfaas_ticket_new(uint32_t op) {
    rfaas_ticket_entry *t = calloc(1, sizeof *t);
    if (!t)
        return 0;
    last = last == UINT32_MAX ? 1 : last + 1;
    t->id = last;
    t->op = op;
    t->next = tickets;
    tickets = t;
    return t->id;
}

rfaas_ticket_entry *rfaas_ticket_find(rfaas_ticket id) {
    rfaas_ticket_entry *t = tickets;
    while (t && t->id != id)
        t = t->next;
    return t;
}

/* Removes a ticket from the list. */
static rfaas_ticket_entry *unlink_ticket(rfaas_ticket id) {
    for (rfaas_ticket_entry **at = &tickets; *at; at = &(*at)->next)
        if ((*at)->id == id) {
            rfaas_ticket_entry *t = *at;
            *at = t->next;
            return t;
        }
    return NULL;
}

bool rfaas_ticket_take(rfaas_ticket id, rfaas_reply *reply) {
    const rfaas_ticket_entry *t = rfaas_ticket_find(id);
    if (!t) {
        *reply = (rfaas_reply){.status = RFAAS_INVALID};
        return true;
    }
    if (!t->done)
        return false;
    *reply = t->reply;
    free(unlink_ticket(id));
    return true;
}

void rfaas_ticket_drop(rfaas_ticket id) {
    rfaas_ticket_entry *t = id ? unlink_ticket(id) : NULL;
    if (t)
        rfaas_reply_free(&t->reply);
    free(t);
}

void rfaas_tickets_lost(const char *why) {
    for (rfaas_ticket_entry *t = tickets; t; t = t->next)
        if (!t->done) {
            t->done = t->reply.lost = true;
            t->reply.status = RFAAS_PEER_GONE;
            snprintf(t->reply.text, sizeof t->reply.text, "%s", why);
        }
}

void rfaas_tickets_forget(void) {
    while (tickets)
        rfaas_ticket_drop(tickets->id);
}
