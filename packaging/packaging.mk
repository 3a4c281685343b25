# Packages and the site: make deb, make dist, make oci, make docs. Part of the Makefile.

# The version of packages: 1.2.3 at the tag v1.2.3. After the tag, it is 1.2.4~dev with the number of commits and the commit, where the first two
# numbers are those of the API. A release archive has the version in the file RELEASE.
PACKAGE_VERSION = $(or $(PACKAGE_VERSION_OF_GIT),$(shell sed -n 1p RELEASE 2>/dev/null),$(API_VERSION).0~unknown)
PACKAGE_VERSION_OF_GIT = $(shell [[ ! -e .git ]] || { git describe --tags --exact-match --match 'v[0-9]*' 2>/dev/null | sed -n 's/^v//p' | grep . || \
	{ last=$$(git describe --tags --abbrev=0 --match 'v$(API_VERSION).[0-9]*' 2>/dev/null || echo .-1) && \
	echo "$(API_VERSION).$$(($${last/*./} + 1))~dev$$(git rev-list --count HEAD).$$(git describe --always --dirty=.dirty --exclude '*')"; }; } 2>/dev/null)
PACKAGE_DATE = $(shell LC_ALL=C date -u -d @$(SOURCE_DATE_EPOCH) '+%a, %d %b %Y %H:%M:%S +0000')

.PHONY: deb
deb: ## Debian packages of this version: build/deb/*.deb (with debhelper)
	$(call say,DEB,build/deb/)
	$(Q)rm -rf build/deb && mkdir -p build/deb/tree && cp -r packaging/debian build/deb/tree
	$(Q)printf '%s\n' 'rfaas ($(PACKAGE_VERSION)) unstable; urgency=medium' '' '  * See /usr/share/doc/rfaas/CHANGELOG.md.' '' \
		' -- The rfaas authors <rfaas-go@users.noreply.github.com>  $(PACKAGE_DATE)' >build/deb/tree/debian/changelog
	$(Q)cd build/deb/tree && umask 022 && TREE=$(CURDIR) DEB_BUILD_OPTIONS="$${DEB_BUILD_OPTIONS:-parallel=$$(nproc)}" debian/rules binary >../log 2>&1 || { tail -n 30 ../log >&2; exit 1; }
	$(Q)rm -r build/deb/tree

.PHONY: docs
docs: man ## the documents as a site: build/docs/site (with mkdocs and groff)
	$(call say,DOCS,build/docs/site/)
	$(Q)packaging/site $(DOCS)

# The files of the commit with the modules of Go, so that it builds without a network.
DIST = rfaas-$(PACKAGE_VERSION)
.PHONY: dist rpm oci
dist: ## an archive of the commit that builds without a network: build/dist/rfaas-VERSION.tar.gz
	$(call say,DIST,build/dist/)
	$(Q)rm -rf build/dist && mkdir -p build/dist
	$(Q)git archive --prefix=$(DIST)/ HEAD | tar -x -C build/dist
	$(Q)cd build/dist/$(DIST) && $(GO) mod vendor && printf '%s\n' '$(VERSION)' >VERSION && printf '%s\n' '$(PACKAGE_VERSION)' $(SOURCE_DATE_EPOCH) >RELEASE
	$(Q)tar -c -C build/dist --sort=name --owner=0 --group=0 --numeric-owner --mode=go=rX,u+rw --mtime=@$(SOURCE_DATE_EPOCH) $(DIST) | \
		gzip -n >build/dist/$(DIST).tar.gz
	$(Q)rm -r build/dist/$(DIST)

build/dist/rfaas.spec: packaging/rfaas.spec.in dist
	$(Q)sed -e 's|@VERSION@|$(PACKAGE_VERSION)|g' -e "s|@DATE@|$$(LC_ALL=C date -u -d @$(SOURCE_DATE_EPOCH) '+%a %b %d %Y')|" $< >$@

rpm: build/dist/rfaas.spec ## RPM packages: build/rpm/*.rpm (with rpmbuild)
	$(call say,RPM,build/rpm/)
	$(Q)rm -rf build/rpm
	$(Q)rpmbuild --quiet -bb --define '_topdir $(CURDIR)/build/rpm' --define '_sourcedir $(CURDIR)/build/dist' --define '_rpmdir $(CURDIR)/build/rpm' $(RPMBUILD_ARGS) $<
	$(Q)rm -rf build/rpm/BUILD build/rpm/BUILDROOT

# The program, the libraries that it needs or loads later (OpenSSL encrypts data on tcp), and an empty directory for its state.
oci: programs ## a container image of the resource manager: build/oci/rfaas-manager.tar
	$(call say,OCI,build/oci/)
	$(Q)rm -rf build/oci && mkdir -p build/oci/root/{usr/bin,var/lib,tmp,etc} && chmod 1777 build/oci/root/tmp && mkdir -m 777 build/oci/root/var/lib/rfaas
	$(Q)install bin/resource-manager build/oci/root/usr/bin
	$(Q){ ldd bin/resource-manager; /sbin/ldconfig -p | grep -E 'lib(ssl|crypto)\.so\.3 .*x86-64|lib(ssl|crypto)\.so\.3 .*AArch64'; } | \
		grep -o '/[^ ]*' | xargs -I FILE cp --parents -L FILE build/oci/root
	$(Q)packaging/oci build/oci/rfaas-manager.tar '$(PACKAGE_VERSION)' build/oci/root
	$(Q)rm -r build/oci/root
