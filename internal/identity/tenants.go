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

// ParseTenants reads rules like "ann=physics,1005=chem,@climate=climate,*=%u". An empty text has no rules.
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
		if strings.Contains(strings.NewReplacer("%u", "", "%g", "").Replace(tenant), "%") {
			return nil, fmt.Errorf("%.80q: %% must be followed by u or g", rule)
		}
		if err := CheckTenant(tenant); err != nil {
			return nil, err
		}
		all = append(all, tenantRule{who, tenant})
	}
	return all, nil
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
	var groups []string // only looked up if a rule needs them
	for _, r := range t {
		name, isGroup := strings.CutPrefix(r.who, "@")
		if isGroup && groups == nil {
			if groups, err = groupsOf(u); err != nil {
				return "", err
			}
		}
		if r.who != "*" && r.who != u.Username && r.who != id && !(isGroup && slices.Contains(groups, name)) {
			continue
		}
		tenant := strings.ReplaceAll(r.tenant, "%u", u.Username)
		if strings.Contains(tenant, "%g") {
			g, err := user.LookupGroupId(u.Gid)
			if err != nil {
				return "", err
			}
			tenant = strings.ReplaceAll(tenant, "%g", g.Name)
		}
		if err := CheckTenant(tenant); err != nil {
			return "", refuse(Forbidden, "%v", err)
		}
		return tenant, nil
	}
	return "", refuse(Forbidden, "user %s (%s) has no tenant in this cluster: the issuer's setting tenants does not name it", u.Username, id)
}

// groupsOf returns the names of a user's groups.
func groupsOf(u *user.User) ([]string, error) {
	ids, err := u.GroupIds()
	if err != nil {
		return nil, err
	}
	names := []string{}
	for _, id := range ids {
		if g, err := user.LookupGroupId(id); err == nil { // a group without a name cannot be in a rule
			names = append(names, g.Name)
		}
	}
	return names, nil
}
