//! Replaces the model name in a request's body with the backend's own name while the body passes. Nothing else is
//! collected or changed, and a piece is copied only if it holds the name.
//!
//! A request's length is sent before its first byte, and the name may come after megabytes. So the length must follow
//! from the two names alone. In a form it does: a field is written in one way only. In JSON a name can have a longer
//! spelling than the one written here, but never a shorter one; so a shorter new name is padded with spaces, which have
//! no meaning there, and a body only ever grows.

mod form;
mod json;

use bytes::Bytes;

use crate::multipart;

/// Renames the model in one body.
#[derive(Debug)]
pub struct Renamer(Kind);

#[derive(Debug)]
enum Kind {
    Json(json::Renamer),
    Form(form::Renamer),
}

impl Renamer {
    /// Creates a renamer for a body of this content type, which replaces the model `requested` with `name`.
    #[must_use]
    pub fn new(content_type: Option<&str>, requested: &str, name: &str) -> Self {
        Self(match content_type.and_then(multipart::boundary) {
            Some(boundary) => Kind::Form(form::Renamer::new(&boundary, requested, name)),
            None => Kind::Json(json::Renamer::new(requested, name)),
        })
    }

    /// Returns the new length of a body of `before` bytes.
    #[must_use]
    pub fn length(&self, before: u64) -> u64 {
        match &self.0 {
            Kind::Json(json) => before.saturating_add(json.growth()),
            Kind::Form(form) => form.length(before),
        }
    }

    /// Adds the next bytes of the body; finished bytes are handed to `pass`.
    pub fn push(&mut self, piece: Bytes, pass: &mut impl FnMut(Bytes)) {
        let pass = &mut |piece: Bytes| {
            if !piece.is_empty() {
                pass(piece);
            }
        };
        match &mut self.0 {
            Kind::Json(json) => json.push(piece, pass),
            Kind::Form(form) => form.push(piece, pass),
        }
    }

    /// Ends the body and passes on the bytes that were held.
    pub fn finish(&mut self, pass: &mut impl FnMut(Bytes)) {
        match &mut self.0 {
            Kind::Json(json) => json.finish(pass),
            Kind::Form(form) => form.finish(pass),
        }
    }
}

#[cfg(test)]
mod tests;
