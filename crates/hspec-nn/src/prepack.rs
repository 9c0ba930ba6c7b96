//! The packed form that a layer may hold besides, or in the place of, its parameter.

use crate::panels::Panels;
use burn::{
    module::{
        AutodiffModule, Content, Devices, EmptyRecord, Module, ModuleDisplay, ModuleDisplayDefault,
        ModuleMapper, ModuleVisitor,
    },
    tensor::backend::{AutodiffBackend, Backend},
};
use std::{marker::PhantomData, sync::Arc};

/// A weight's packed form, if there is one. Whatever may change parameters (a mapper, a record, training)
/// drops it, so that it never disagrees with the parameter beside it.
#[derive(Debug, Clone)]
pub(crate) struct Prepacked<B: Backend> {
    pub(crate) panels: Option<Arc<Panels>>,
    /// Burn's derived code passes over fields that do not name the backend.
    backend: PhantomData<B>,
}

impl<B: Backend> Prepacked<B> {
    pub(crate) fn new(panels: Option<Arc<Panels>>) -> Self {
        Self { panels, backend: PhantomData }
    }
}

impl<B: Backend> Module<B> for Prepacked<B> {
    type Record = EmptyRecord;

    fn visit<V: ModuleVisitor<B>>(&self, _: &mut V) {}

    fn map<M: ModuleMapper<B>>(self, _: &mut M) -> Self {
        Self::new(None)
    }

    fn load_record(self, _: Self::Record) -> Self {
        Self::new(None)
    }

    fn into_record(self) -> Self::Record {
        EmptyRecord::new()
    }

    fn to_device(self, _: &B::Device) -> Self {
        self
    }

    fn fork(self, _: &B::Device) -> Self {
        self
    }

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        devices
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for Prepacked<B> {
    type InnerModule = Prepacked<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        Prepacked::new(None)
    }

    fn from_inner(_: Self::InnerModule) -> Self {
        Self::new(None)
    }
}

impl<B: Backend> ModuleDisplayDefault for Prepacked<B> {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&format!("{:?}", self.panels)).optional()
    }
}

impl<B: Backend> ModuleDisplay for Prepacked<B> {}
