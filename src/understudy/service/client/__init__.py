"""Client: remote writers, samplers and parameter subscriptions."""
