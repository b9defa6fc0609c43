//! The origin and the details of the events in the audit log.

use std::net::IpAddr;

use axum::body::Body;
use axum::extract::Request;
use http::StatusCode;

use crate::http::respond::Client;
use crate::state::Relay;
use crate::telemetry::audit::{self, Action, AuditEvent, Outcome};

/// Details of a change that are not in the request's path. A route puts them into the extensions of its response.
#[derive(Debug, Clone, Default)]
pub(crate) struct AuditDetail {
    /// The id of the created object.
    pub(crate) subject: Option<String>,
    /// The order.
    pub(crate) detail: Option<String>,
}

/// The origin of an event.
pub(crate) struct AuditActor {
    client: IpAddr,
    request_id: String,
}

impl AuditActor {
    pub(crate) fn of(relay: &Relay, request: &Request<Body>) -> Self {
        let client = relay.client_address(request.headers(), request.extensions());
        Self { client, request_id: Client::of(request).request_id }
    }

    /// The client's address.
    pub(crate) fn address(&self) -> IpAddr {
        self.client
    }

    /// Records the action and the status of its response.
    pub(crate) fn note(self, relay: &Relay, action: Action, status: StatusCode, detail: AuditDetail) {
        let Self { client, request_id } = self;
        let (status, AuditDetail { subject, detail }) = (status.as_u16(), detail);
        let outcome = Outcome::of(status);
        relay.audit.record(&AuditEvent {
            time: audit::now(),
            action,
            outcome,
            status,
            subject,
            detail,
            client,
            request_id,
        });
    }
}
