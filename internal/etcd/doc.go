// Package etcd makes one of several resource managers the leader, by an election in etcd, and keeps the leader's ledger there.
//
// Every write to the ledger is one transaction of etcd, on two conditions: the leader's key is still the one that this process has won, and
// the record "seq" has not changed since this process's last write. So a process that has lost its leadership, also without knowing it,
// writes nothing. A write whose reply was lost is found by its id in "seq", so it counts once.
//
// A ledger has an id, which Init or Import writes last. Without it, no process becomes the leader. So a prefix that is misspelt, or whose keys
// were lost, is not taken for a new ledger.
//
//	PREFIX/leader/LEASE     the candidates, of which the oldest is the leader
//	PREFIX/seq              id of the last write, 16 random bytes
//	PREFIX/ledger/BUCKET/KEY  records as package accounting describes them. rfaas/id is the id
//	PREFIX/importing        while Import runs, a random text of its process
//	PREFIX/exported         where Export has written the ledger, which then has no id
package etcd
