package board

import (
	"encoding/binary"
	"fmt"
)

// MailboxChanges is how many changes a mailbox shows.
const MailboxChanges = 3

// Change is a change of an executor's state.
type Change struct {
	Slot        uint32
	Incarnation uint32 // low half of the line's
	State       State  // the new state
}

// Mailbox is what the manager writes to a subscriber: how many changes there have been, and the last of them, newest first.
// It is always the whole state, so a write that replaces an unread one loses nothing but the details of old changes.
type Mailbox struct {
	Epoch   uint64 // of the manager
	Changes uint64 // since the manager started
	Latest  [MailboxChanges]Change
}

// Encode writes the mailbox into MailboxSize bytes.
func (m *Mailbox) Encode(b []byte) {
	_ = b[:MailboxSize]
	le := binary.LittleEndian
	clear(b[:MailboxSize])
	le.PutUint64(b[0:], m.Epoch)
	le.PutUint64(b[8:], m.Changes)
	for i, c := range m.Latest {
		le.PutUint32(b[16+12*i:], c.Slot)
		le.PutUint32(b[20+12*i:], c.Incarnation)
		le.PutUint32(b[24+12*i:], uint32(c.State))
	}
	seal(b[:MailboxSize])
}

// ParseMailbox reads a mailbox. A mailbox that was never written has Epoch 0. Errors: ErrTorn, ErrLayout.
func ParseMailbox(b []byte) (Mailbox, error) {
	var m Mailbox
	b = b[:MailboxSize]
	if !sealed(b) {
		if empty(b) {
			return m, nil
		}
		return m, fmt.Errorf("mailbox: %w", ErrTorn)
	}
	le := binary.LittleEndian
	m.Epoch, m.Changes = le.Uint64(b), le.Uint64(b[8:])
	for i := range m.Latest {
		state := le.Uint32(b[24+12*i:])
		if state >= uint32(len(stateNames)) {
			return m, fmt.Errorf("%w: mailbox: state %d", ErrLayout, state)
		}
		m.Latest[i] = Change{Slot: le.Uint32(b[16+12*i:]), Incarnation: le.Uint32(b[20+12*i:]), State: State(state)}
	}
	return m, nil
}

// Since returns the changes after the first seen ones, oldest first. all is false if there were more than a mailbox shows:
// then anything may have changed.
func (m *Mailbox) Since(seen uint64) (changes []Change, all bool) {
	if m.Changes <= seen {
		return nil, true
	}
	n := min(m.Changes-seen, MailboxChanges)
	for i := range n {
		changes = append(changes, m.Latest[n-1-i])
	}
	return changes, m.Changes-seen <= MailboxChanges
}
