"""Sample: batches from views: selectors, samplers, mixtures, prefetching and rate limits."""
