/* Requests to the agent that are under way, and their replies. Call all functions under the mutex of the connection (agent.c). */
#ifndef RFAAS_AGENT_TICKET_H
#define RFAAS_AGENT_TICKET_H

#include "agent.h"

typedef struct rfaas_ticket_entry {
    struct rfaas_ticket_entry *next;
    rfaas_ticket id;
    uint32_t op;
    bool done; /* `reply` is valid */
    rfaas_reply reply;
} rfaas_ticket_entry;

/* Returns a new ticket; 0: out of memory. */
rfaas_ticket rfaas_ticket_new(uint32_t op);
/* Returns NULL if there is no such ticket. */
rfaas_ticket_entry *rfaas_ticket_find(rfaas_ticket id);
/* Moves the reply to *reply and makes the ticket invalid. Returns false if there is no reply yet. For an invalid ticket it returns true and
 * a reply with status RFAAS_INVALID. */
bool rfaas_ticket_take(rfaas_ticket id, rfaas_reply *reply);
/* Frees a ticket with its reply. 0: does nothing. */
void rfaas_ticket_drop(rfaas_ticket id);
/* Ends all requests without a reply: they are lost, with status RFAAS_PEER_GONE and the text `why`. */
void rfaas_tickets_lost(const char *why);
/* Frees all tickets with their replies. */
void rfaas_tickets_forget(void);

#endif
