//! Relay and worker as a person would deploy them, with plain manifests and no operator: that the images run under
//! `restricted`, that workers find every relay by DNS, and that a kubelet's order of ending things drops no request.

mod serving;
mod stack;
