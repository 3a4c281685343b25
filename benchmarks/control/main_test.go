package control

import (
	"os"
	"testing"

	"github.com/rfaas-go/rfaas/tests/agenttest"
)

func TestMain(m *testing.M) { os.Exit(agenttest.Run("../..", m.Run)) }
