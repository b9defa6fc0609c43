//! The two changes that the relay makes to a request's body: the model's name in place of an alias, and the request for the usage of a
//! stream. The copy is charged to the memory budget like the original, which is dropped.

use bytes::Bytes;
use http::request::Parts;
use modelrelay_protocol::error::ApiError;

use super::auth::Caller;
use super::inference::LONG_READ_BYTES;
use super::parse;
use super::usage_request::Edit;
use crate::net::budget::{Holder, Purpose};
use crate::state::Relay;
use crate::system::blocking;

/// The routes on which backends report the usage of a stream only on request.
const ROUTES: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Replaces an alias.
pub fn rename(
    relay: &Relay,
    holder: Holder,
    body: &Bytes,
    routed: &parse::Routed,
    model: &str,
) -> Result<Bytes, ApiError> {
    let bytes = body.len() as u64;
    let mut reservation = relay.shared.budget.open_for(holder);
    reservation.grow_for_copy(bytes, Purpose::of_body(bytes))?;
    Ok(reservation.hold(parse::with_model(body, routed, model)))
}

/// Makes the body of a stream request its usage. Returns true if it did not before, so that the client does not expect it. If the larger
/// body does not fit, it stays, and the usage is estimated.
pub async fn request_usage(relay: &Relay, (caller, parts): (&Caller, &Parts), body: &mut Bytes) -> bool {
    let config = relay.shared.config.load();
    if !config.request_usage || !ROUTES.contains(&parts.uri.path()) {
        return false;
    }
    let edit = if body.len() < LONG_READ_BYTES {
        Edit::of(body)
    } else {
        let body = body.clone();
        blocking::run(move || Edit::of(&body)).await.ok().flatten()
    };
    let Some(edit) = edit else { return false };
    let bytes = edit.len_of(body) as u64;
    let mut reservation = relay.shared.budget.open_for(caller.holder(relay, parts));
    let fits = bytes <= config.max_request_bytes && reservation.grow_for_copy(bytes, Purpose::of_body(bytes)).is_ok();
    if fits {
        *body = reservation.hold(edit.apply(body));
    }
    fits
}
