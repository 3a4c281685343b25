package identity

import (
	"errors"
	"fmt"
	"os/user"
	"slices"
	"strconv"
	"strings"
)

// Tenants says which tenant pays for a user: the first rule that matches.
type Tenants []tenantRule

type tenantRule struct {
	who    string // a name, a user id, @GROUP or *
	tenant string // %u is the user's name, %g that of the user's primary group
}

// Users whom the rule * matches. Others belong to the system.
const (
	firstUser = 1000
	nobody    = 65534
)

// ParseTenants reads rules like "ann=physics,1005=chem,@climate=climate,*=u-%u". An empty text has no rules.
func ParseTenants(text string) (Tenants, error) {
	var all Tenants
	for rule := range strings.SplitSeq(text, ",") {
		rule = strings.TrimSpace(rule)
		if rule == "" {
			continue
		}
		who, tenant, ok := strings.Cut(rule, "=")
		who, tenant = strings.TrimSpace(who), strings.TrimSpace(tenant)
		if !ok || who == "" || who == "@" || strings.ContainsAny(who, " \t") {
			return nil, fmt.Errorf("%.80q is not USER=TENANT, @GROUP=TENANT or *=TENANT", rule)
		}
		if n := strings.Count(tenant, "%"); n > 1 || n != strings.Count(tenant, "%u")+strings.Count(tenant, "%g") {
			return nil, fmt.Errorf("%.80q: want %%u or %%g, at most once", rule)
		}
		if err := CheckTenant(tenant); err != nil {
			return nil, err
		}
		for _, r := range all {
			if mayCollide(r.tenant, tenant) {
				return nil, fmt.Errorf("the names of different users or groups can make %q and %q the same tenant: let one begin otherwise, like g-%%g", r.tenant, tenant)
			}
		}
		all = append(all, tenantRule{who, tenant})
	}
	return all, nil
}

// mayCollide reports whether two different texts that both contain %u or %g can become the same.
func mayCollide(a, b string) bool {
	before, _, isPattern := strings.Cut(a, "%")
	other, _, areBoth := strings.Cut(b, "%")
	return isPattern && areBoth && a != b && (strings.HasPrefix(before, other) || strings.HasPrefix(other, before))
}

// Of returns the tenant of a user. It asks the system for the user's name and groups. The error is an *Error if the user is unknown or no rule
// matches.
func (t Tenants) Of(uid uint32) (string, error) {
	id := strconv.FormatUint(uint64(uid), 10)
	if uid == 0 {
		return "", refuse(Forbidden, "root gets no token: ask as the user who runs the programs")
	}
	u, err := user.LookupId(id)
	var unknown user.UnknownUserIdError
	if errors.As(err, &unknown) {
		return "", refuse(Forbidden, "user id %s is unknown on the issuer's machine", id)
	}
	if err != nil {
		return "", err
	}
	return t.of(uid, u, user.LookupGroupId)
}

// of is Of for a user who was looked up. group looks up a group by its id.
func (t Tenants) of(uid uint32, u *user.User, group func(id string) (*user.Group, error)) (string, error) {
	id := strconv.FormatUint(uint64(uid), 10)
	var groups []string // only looked up if a rule needs them
	for _, r := range t {
		name, isGroup := strings.CutPrefix(r.who, "@")
		if isGroup && groups == nil {
			var err error
			if groups, err = groupsOf(u, group); err != nil {
				return "", err
			}
		}
		var matches bool
		switch {
		case r.who == "*":
			matches = uid >= firstUser && uid != nobody
		case isGroup:
			matches = slices.Contains(groups, name)
		case strings.Trim(r.who, "0123456789") == "":
			matches = r.who == id
		default:
			matches = r.who == u.Username
		}
		if !matches {
			continue
		}
		tenant := strings.ReplaceAll(r.tenant, "%u", u.Username)
		if strings.Contains(tenant, "%g") {
			g, err := group(u.Gid)
			if err != nil {
				return "", err
			}
			tenant = strings.ReplaceAll(tenant, "%g", g.Name)
		}
		if err := CheckTenant(tenant); err != nil {
			return "", refuse(Forbidden, "%v", err)
		}
		if tenant != r.tenant && slices.ContainsFunc(t, func(o tenantRule) bool { return o.tenant == tenant }) {
			return "", refuse(Forbidden, "user %s (%s) has no tenant in this cluster: %q, which the name of the user or the group makes, is the tenant of another rule",
				u.Username, id, tenant)
		}
		return tenant, nil
	}
	return "", refuse(Forbidden, "user %s (%s) has no tenant in this cluster: the issuer's setting tenants does not name it", u.Username, id)
}

// groupsOf returns the names of a user's groups.
func groupsOf(u *user.User, group func(id string) (*user.Group, error)) ([]string, error) {
	ids, err := u.GroupIds()
	if err != nil {
		return nil, err
	}
	names := []string{}
	for _, id := range ids {
		g, err := group(id)
		var unknown user.UnknownGroupIdError
		switch {
		case err == nil:
			names = append(names, g.Name)
		case !errors.As(err, &unknown): // a group without a name cannot be in a rule
			return nil, err
		}
	}
	return names, nil
}
