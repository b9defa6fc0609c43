//! A backend that runs by itself and is never unloaded: loading only checks that it serves.

use url::Url;

use super::http::Client;
use super::served::Served;
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;

/// Models at fixed addresses. Several in one slot only if the operator declares that they can be loaded at once.
#[derive(Debug)]
pub struct StaticUrl {
    models: Vec<(Served, Client)>,
}

impl StaticUrl {
    /// Creates a driver for these models and their URLs.
    pub fn new(models: impl IntoIterator<Item = (Served, Url)>) -> Self {
        Self { models: models.into_iter().map(with_client).collect() }
    }

    fn find(&self, model: &Model) -> Result<&(Served, Client), DriverError> {
        let found = self.models.iter().find(|(served, _)| served.id == *model);
        found.ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    async fn nothing(&self, model: &Model) -> Result<(), DriverError> {
        self.find(model).map(|_| ())
    }
}

fn with_client((served, url): (Served, Url)) -> (Served, Client) {
    let client = served.client(url);
    (served, client)
}

impl Driver for StaticUrl {
    fn capabilities(&self) -> Capabilities {
        Capabilities { leaves: Left::Nothing, can_coexist: true, owns_backends: false, returns: Returns::ALL }
    }

    fn models(&self) -> Vec<Model> {
        self.models.iter().map(|(served, _)| Model::clone(&served.id)).collect()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.find(model).ok().map(|(_, client)| client.base().clone())
    }

    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            let (served, client) = self.find(model)?;
            served.reach(client).await
        })
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            let (served, client) = self.find(model)?;
            served.probe(client).await
        })
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async {
            let (served, client) = self.find(model)?;
            Ok(served.become_ready(client).await?)
        })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async { self.nothing(model).await.map(|()| Left::Nothing) })
    }

    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.nothing(model))
    }
}
