//! Black-box tests of the relay: one per rule of its contract and per row of its tables, by area.
//!
//! One binary for all areas, because linking takes most of the time. The tests inside run in parallel, each with its
//! own relay.

mod support;

mod admin;
mod admin_listener;
mod admin_token;
mod aliases;
mod api_keys;
mod audit;
mod base_path;
mod body_shares;
mod browser;
mod cancel;
mod core1_bodies;
mod core1_credits;
mod core1_grants;
mod core1_links;
mod ctl;
mod dashboard;
mod fairness;
mod first_byte;
mod headers;
mod health;
mod homes;
mod keys_forget;
mod keys_secret;
mod keys_secret_faults;
mod keys_update;
mod kubernetes;
mod log;
mod model_details;
mod model_names;
mod models;
mod noisy_worker;
mod parsing;
mod placement;
mod providers;
mod published_worker;
mod queue;
mod queue_position;
mod reload;
mod request_journal;
mod requeue;
mod routing;
mod selection;
mod settings;
mod shutdown;
mod slots1;
mod slots1_admin;
mod slots1_choice;
mod slots1_names;
mod slow_client;
mod socket_auth;
mod socket_protocol;
mod socket_register;
mod stored_responses;
mod streams;
mod timeouts;
mod tls;
mod token_limits;
mod usage;
mod worker_errors;
mod worker_tokens;
mod worker_tokens_faults;
