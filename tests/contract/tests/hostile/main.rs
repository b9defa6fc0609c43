//! Peers that mean harm, or behave as if they did: what they can reach, and what their neighbours notice.

mod smuggling;
