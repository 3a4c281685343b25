package identity

import (
	"errors"
	"fmt"
	"os/user"
	"reflect"
	"strings"
	"testing"
)

func TestTenants(t *testing.T) {
	groups := map[string]string{"5": "staff", "100": "physics"}
	group := func(id string) (*user.Group, error) {
		if name, ok := groups[id]; ok {
			return &user.Group{Gid: id, Name: name}, nil
		}
		return nil, user.UnknownGroupIdError(id)
	}
	type who struct {
		uid       uint32
		name, gid string
	}
	bob, games, physics, number := who{2000, "bob", "100"}, who{5, "games", "5"}, who{2001, "physics", "5"}, who{2002, "1005", "5"}
	for _, c := range []struct {
		rules string
		who   who
		want  string
	}{
		{"*=%u", bob, "bob"}, {"*=%g", bob, "physics"}, {"*=u-%u", bob, "u-bob"}, {"bob=a,*=b", bob, "a"}, {"2000=a", bob, "a"}, {"x=a, *=b ", bob, "b"}, {"x=a", bob, ""},
		{"*=%u", games, ""}, {"games=%u", games, "games"}, {"*=%u", who{65534, "nobody", "5"}, ""}, {"*=%u", who{999, "system", "5"}, ""},
		{"ann=physics,*=%u", physics, ""}, {"*=%u,ann=physics", physics, ""}, {"ann=physics,physics=%u", physics, ""}, {"*=%g", physics, "staff"},
		{"1005=chem,*=b", number, "b"}, {"1005=chem", who{1005, "carl", "5"}, "chem"},
	} {
		r, err := ParseTenants(c.rules)
		if err != nil {
			t.Fatal(err)
		}
		got, err := r.of(c.who.uid, &user.User{Uid: fmt.Sprint(c.who.uid), Gid: c.who.gid, Username: c.who.name}, group)
		if got != c.want || (err == nil) != (c.want != "") || err != nil && reason(err) != Forbidden {
			t.Errorf("%q, %+v: %q, %v, want %q", c.rules, c.who, got, err, c.want)
		}
	}
	for _, bad := range []string{"ann", "=x", "ann=", "@=x", "*=%z", "*=%", "a b=c", "ann=" + strings.Repeat("x", 65), "@a=%g,*=%u", "a=%u-big,*=%u", "a=g-%g,*=%u", "*=%u-%g"} {
		if r, err := ParseTenants(bad); err == nil {
			t.Errorf("%q is accepted: %v", bad, r)
		}
	}
	if r, err := ParseTenants("@a=g-%g,*=u-%u,b=u-%u"); err != nil {
		t.Error(r, err)
	}
	for _, uid := range []uint32{0, 4000000000} {
		if _, err := (Tenants{{"*", "x"}}).Of(uid); reason(err) != Forbidden {
			t.Errorf("%d: %v", uid, err)
		}
	}
	// Of groups, those without a name are left out. Any other failure ends the search, so that no later rule decides.
	root, err := user.LookupId("0")
	if err != nil {
		t.Fatal(err)
	}
	down := errors.New("the directory is down")
	rules := Tenants{{"@x", "a"}, {"root", "b"}}
	if got, err := rules.of(0, root, group); got != "b" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := rules.of(0, root, func(string) (*user.Group, error) { return nil, down }); !errors.Is(err, down) {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := groupsOf(root, func(id string) (*user.Group, error) { return &user.Group{Name: "g" + id}, nil }); err != nil || !reflect.DeepEqual(got[:1], []string{"g0"}) {
		t.Errorf("%q, %v", got, err)
	}
}
