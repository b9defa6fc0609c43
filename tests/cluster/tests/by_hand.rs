//! Relay and worker deployed manually with plain manifests and no operator: the images run under `restricted`, workers
//! find every relay by DNS, and the kubelet's order of termination drops no request.

mod serving;
mod stack;
