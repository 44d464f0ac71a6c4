"""How good a policy is on problems it was never trained on."""
