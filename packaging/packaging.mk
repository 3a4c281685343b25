# Packages: make deb, make rpm, make dist, make oci. Part of the Makefile.

# The version of packages: that of the tag v1.2.3, or before the next one 1.2.3~dev, the number of commits and the commit. A release
# archive has it in the file RELEASE.
PACKAGE_VERSION = $(or $(PACKAGE_VERSION_OF_GIT),$(shell sed -n 1p RELEASE 2>/dev/null),$(API_VERSION).0~unknown)
PACKAGE_VERSION_OF_GIT = $(shell [[ ! -e .git ]] || { git describe --tags --exact-match --match 'v[0-9]*' 2>/dev/null | sed -n 's/^v//p' | grep . || \
	echo "$(API_VERSION).0~dev$$(git rev-list --count HEAD).$$(git describe --always --dirty=.dirty --exclude '*')"; } 2>/dev/null)
PACKAGE_DATE = $(shell LC_ALL=C date -u -d @$(SOURCE_DATE_EPOCH) '+%a, %d %b %Y %H:%M:%S +0000')

.PHONY: deb
deb: build ## Debian packages of this version: build/deb/*.deb (with debhelper)
	$(call say,DEB,build/deb/)
	$(Q)rm -rf build/deb && mkdir -p build/deb/tree && cp -r packaging/debian build/deb/tree
	$(Q)printf '%s\n' 'rfaas ($(PACKAGE_VERSION)) unstable; urgency=medium' '' '  * See /usr/share/doc/rfaas/CHANGELOG.md.' '' \
		' -- The rfaas authors <maintainers@rfaas.invalid>  $(PACKAGE_DATE)' >build/deb/tree/debian/changelog
	$(Q)cd build/deb/tree && umask 022 && TREE=$(CURDIR) debian/rules binary >../log 2>&1 || { tail -n 30 ../log >&2; exit 1; }
	$(Q)rm -r build/deb/tree
