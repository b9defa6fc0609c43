//! Puts a backend's own name of a model into a request's body while the body passes: nothing is collected, nothing else is
//! changed, and no piece is copied that does not hold the name.
//!
//! A request's length goes out before its first byte, and the name may stand behind megabytes. So the length must follow
//! from the two names alone. In a form it does: a field is written in one way only. In JSON a name can be spelled longer
//! than it has to be, but never shorter than we spell it; so the new one is followed by spaces where it is shorter than
//! what it replaces, which mean nothing there, and a body only ever grows.

mod form;
mod json;

use bytes::Bytes;

use crate::multipart;

/// One body on its way.
#[derive(Debug)]
pub struct Renamer(Kind);

#[derive(Debug)]
enum Kind {
    Json(json::Renamer),
    Form(form::Renamer),
}

impl Renamer {
    /// For a body of this content type whose model is `asked`, and is to be `name`.
    #[must_use]
    pub fn new(content_type: Option<&str>, asked: &str, name: &str) -> Self {
        Self(match content_type.and_then(multipart::boundary) {
            Some(boundary) => Kind::Form(form::Renamer::new(&boundary, asked, name)),
            None => Kind::Json(json::Renamer::new(asked, name)),
        })
    }

    /// How long a body of so many bytes becomes.
    #[must_use]
    pub fn length(&self, before: u64) -> u64 {
        match &self.0 {
            Kind::Json(json) => before.saturating_add(json.growth()),
            Kind::Form(form) => form.length(before),
        }
    }

    /// The next bytes of the body; what may go on of them is handed to `pass`.
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

    /// The body is at its end; what was kept goes on.
    pub fn finish(&mut self, pass: &mut impl FnMut(Bytes)) {
        match &mut self.0 {
            Kind::Json(json) => json.finish(pass),
            Kind::Form(form) => form.finish(pass),
        }
    }
}

#[cfg(test)]
mod tests;
