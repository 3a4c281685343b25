package claim

// An executor hands out its regions in this way: an agent connects to a socket whose name begins with Sockets, and sends a token. The executor answers with a
// proof and the region's descriptor. Token and proof have Secret bytes.
const (
	Sockets = "@rfaas-claims-"
	Secret  = 16
)
