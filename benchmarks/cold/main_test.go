package cold

import (
	"os"
	"testing"

	"github.com/rfaas-go/rfaas/internal/agenttest"
)

func TestMain(m *testing.M) { os.Exit(agenttest.Run("../..", m.Run)) }
