/* Messages of the control seam. */
#include <stdlib.h>
#include <string.h>

#include "rfaas_api.h"

enum { FIELD_HEAD = 8 };

static uint8_t *grow(rfaas_msg *m, uint64_t n) {
    if (m->failed)
        return NULL;
    if (m->cap - m->len < n) {
        uint64_t cap = m->cap ? m->cap : 512;
        while (cap - m->len < n)
            cap *= 2;
        uint8_t *p = realloc(m->data, cap);
        if (!p) {
            m->failed = true;
            return NULL;
        }
        m->data = p;
        m->cap = cap;
    }
    uint8_t *at = m->data + m->len;
    m->len += n;
    return at;
}

void rfaas_msg_bytes(rfaas_msg *m, uint16_t tag, const void *data, uint64_t len) {
    if (len > UINT32_MAX) {
        m->failed = true;
        return;
    }
    uint8_t *at = grow(m, FIELD_HEAD + len);
    if (!at)
        return;
    uint16_t zero = 0;
    uint32_t n = (uint32_t)len;
    memcpy(at, &tag, 2);
    memcpy(at + 2, &zero, 2);
    memcpy(at + 4, &n, 4);
    if (len)
        memcpy(at + FIELD_HEAD, data, len);
}

void rfaas_msg_u64(rfaas_msg *m, uint16_t tag, uint64_t v) { rfaas_msg_bytes(m, tag, &v, sizeof v); }

void rfaas_msg_str(rfaas_msg *m, uint16_t tag, const char *s) {
    if (s)
        rfaas_msg_bytes(m, tag, s, strlen(s));
}

void rfaas_msg_free(rfaas_msg *m) {
    free(m->data);
    memset(m, 0, sizeof *m);
}

/* Takes the field at *pos; false at the end or when the rest is no field. */
static bool next(const rfaas_msg *m, uint64_t *pos, uint16_t *tag, const uint8_t **data, uint32_t *len) {
    if (m->len - *pos < FIELD_HEAD)
        return false;
    memcpy(tag, m->data + *pos, 2);
    memcpy(len, m->data + *pos + 4, 4);
    if (m->len - *pos - FIELD_HEAD < *len)
        return false;
    *data = m->data + *pos + FIELD_HEAD;
    *pos += FIELD_HEAD + (uint64_t)*len;
    return true;
}

bool rfaas_msg_check(const rfaas_msg *m) {
    uint64_t pos = 0;
    uint16_t tag;
    uint32_t len;
    const uint8_t *data;
    while (next(m, &pos, &tag, &data, &len)) {
    }
    return pos == m->len;
}

const uint8_t *rfaas_msg_find(const rfaas_msg *m, uint16_t tag, uint32_t n, uint32_t *len) {
    uint64_t pos = 0;
    uint16_t t;
    const uint8_t *data;
    while (next(m, &pos, &t, &data, len))
        if (t == tag && n-- == 0)
            return data;
    *len = 0; /* not that of the last field looked at */
    return NULL;
}

uint64_t rfaas_msg_nth_u64(const rfaas_msg *m, uint16_t tag, uint32_t n, uint64_t absent) {
    uint32_t len;
    const uint8_t *p = rfaas_msg_find(m, tag, n, &len);
    uint64_t v;
    if (!p || len != sizeof v)
        return absent;
    memcpy(&v, p, sizeof v);
    return v;
}

uint64_t rfaas_msg_get_u64(const rfaas_msg *m, uint16_t tag, uint64_t absent) {
    return rfaas_msg_nth_u64(m, tag, 0, absent);
}

void rfaas_msg_get_str(const rfaas_msg *m, uint16_t tag, char *out, size_t cap) {
    uint32_t len = 0;
    const uint8_t *p = rfaas_msg_find(m, tag, 0, &len);
    size_t n = p ? len : 0;
    if (n > cap - 1)
        n = cap - 1;
    if (n)
        memcpy(out, p, n);
    out[n] = 0;
}
